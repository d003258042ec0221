"""Activations that wait on the host, whatever the copies take: training is that of one device without them, bit for bit."""

from __future__ import annotations

from dataclasses import replace
from unittest import mock

import pytest
import torch

from device.slow_copies import SlowCopies
from device.test_exactness import A
from heterodyne.graph.ir import ModelGraph
from heterodyne.runtime.stages import host_link
from multiprocess.models import build, captured
from multiprocess.pool import Pool, World, accelerator
from multiprocess.test_training_pipelines import SAMPLES, Spread, worker_under
from multiprocess.work import PipelineOf, StageOf

STEPS, MOST_S = 6, 0.003


def trained(world: World, graph: ModelGraph, spread: Spread, most_s: float | None) -> tuple[list[float], int, int]:
    """Losses; with slow copies also how many there were, and how many went into or came out of memory that was let go of."""
    case = build(graph, SAMPLES)
    worker = worker_under(world, case, spread)
    if most_s is None:
        losses = [worker.step(case.batch).loss for _ in range(STEPS)]
        slow = None
    else:
        device = torch.device(world.device, 0)
        slow = SlowCopies(accelerator(world.device), device, seed=world.rank, most_s=most_s)
        with mock.patch.object(host_link, "copy", slow.copy):
            losses = [worker.step(case.batch).loss for _ in range(STEPS)]
        torch.accelerator.synchronize(device)
        slow.close()
    worker.close()
    return losses, 0 if slow is None else slow.done, 0 if slow is None else slow.lost


def spread_of(graph: ModelGraph, *, hosted: bool, stages: int, schedule: str, ahead: int | None = None) -> Spread:
    """All blocks of the first stage on the host, but for one that is computed again; of two micro-batches or more."""
    ops, blocks = len(graph.ops), graph.blocks
    cuts = (ops,) if stages == 1 else (blocks[2].stop, ops)
    made, start = [], 0
    for rank, stop in enumerate(cuts):
        whole = tuple(b.index for b in blocks if start <= b.start < b.stop <= stop)
        made.append(StageOf(stop, (rank,), (1,), hosted=whole if hosted else ()))
        start = stop
    if hosted:
        made[0] = replace(
            made[0], reload=ahead, recompute=made[0].hosted[1:2], hosted=(made[0].hosted[0], *made[0].hosted[2:])
        )
    return schedule, (PipelineOf((3, 2, 4), tuple(made)),)


@pytest.mark.parametrize(
    ("name", "stages", "schedule", "ahead"),
    [("llama", 2, "1F1B", 1), ("gpt2", 2, "ZBH1", None), ("gpt2", 1, "GPipe", 2)],
)
def test_training_is_that_without_host_whatever_copies_take(
    pool: Pool, name: str, stages: int, schedule: str, ahead: int | None
) -> None:
    graph = captured(name)
    plain, hosted = (
        spread_of(graph, hosted=way, stages=stages, schedule=schedule, ahead=ahead) for way in (False, True)
    )
    devices = (A,) * stages
    expected = pool.run(stages, trained, graph, plain, None, devices=devices)
    found = pool.run(stages, trained, graph, hosted, MOST_S, devices=devices)
    for (losses, copies, lost), (wanted, _, _) in zip(found, expected, strict=True):
        assert losses == wanted
        assert copies > STEPS
        assert lost == 0

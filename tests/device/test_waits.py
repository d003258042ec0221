"""How often a step makes the host wait for its accelerator. Each number is a bar: it may fall."""

from __future__ import annotations

from typing import Any

import pytest

from device.accelerator import Counts
from device.test_exactness import CPU, A
from heterodyne.graph.ir import ModelGraph
from heterodyne.runtime.same_batch import is_looked_at
from multiprocess.models import build, captured
from multiprocess.pool import Pool, World, accelerator
from multiprocess.test_training_pipelines import SAMPLES, Spread, chain, in_parts, worker_under


def counted(world: World, graph: ModelGraph, spread: Spread) -> Counts:
    """Of one step that is recorded, after those in which things are made and values are looked at; of the host nothing is counted."""
    case = build(graph, SAMPLES)
    worker = worker_under(world, case, spread)
    worker.recorder.on = True
    while is_looked_at(worker.steps_done):
        worker.step(case.batch)
    device = None if world.device == CPU else accelerator(world.device)
    before = Counts(0, 0, 0, 0, 0) if device is None else device.counts()
    worker.step(case.batch)
    counts = before - before if device is None else device.counts() - before
    worker.close()
    return counts


@pytest.mark.parametrize("spread", [chain, in_parts])
def test_a_step_waits_for_its_loss_only(pool: Pool, spread: Any) -> None:
    graph = captured("gpt2")
    micro_batches = len(spread(graph)[1][0].sizes)
    for counts in pool.run(4, counted, graph, spread(graph), devices=(A,) * 4):
        assert counts.scalar_reads == 0
        assert counts.copies_to_host == 0
        assert counts.synchronisations <= 2, "the losses, which the last backward hides; the norm of the step before"
        assert counts.copies_to_device <= 2 * micro_batches, (
            "where a stage in parts cuts the inputs, which come from pinned memory"
        )


def test_devices_of_a_platform_send_to_each_other_directly_beside_others(pool: Pool) -> None:
    graph = captured("gpt2")
    spread = chain(graph)
    first, *_ = pool.run(4, counted, graph, spread, devices=(A, A, A, CPU))
    assert len(spread[1][0].sizes) > 2, "what goes to the second stage would be so many copies"
    assert first.copies_to_host <= 2, "the loss and the norm"

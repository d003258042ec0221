"""Two vendors and a CPU in one job, each in its own precision, go where one device goes that computes as they do."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from device.test_exactness import CPU, A, B
from heterodyne.graph.ir import ModelGraph
from multiprocess.models import build, captured
from multiprocess.pool import Pool, World
from multiprocess.test_training_pipelines import SAMPLES, Spread, chain, in_parts, whole, worker_under
from multiprocess.work import copied, go_on, save

MIXED: dict[str, Any] = {A: "bf16", B: "fp16", CPU: "fp32"}


def trained(world: World, graph: ModelGraph, spread: Spread, precision: Any, folder: Path) -> list[float]:
    """Losses of five steps; the last three again, bit for bit, by a worker that goes on from a checkpoint."""
    batch = build(graph, SAMPLES).batch
    worker = worker_under(world, build(graph, SAMPLES), spread, precision=precision)
    losses = [worker.step(batch).loss for _ in range(2)]
    save(worker, folder)
    results = [worker.step(batch) for _ in range(3)]
    worker.close()
    assert all((r.scale is None) == (precision == "fp32") for r in results)
    resumed = worker_under(world, build(graph, SAMPLES), spread, precision=precision)
    go_on(resumed, folder)
    again = [resumed.step(batch).loss for _ in range(3)]
    assert again == [r.loss for r in results]
    resumed.close()
    return [*losses, *(r.loss for r in results)]


@pytest.mark.parametrize(
    ("spread", "devices"),
    [
        (whole, (CPU, A, B, CPU)),  # replicas on the two accelerators
        (chain, (A, B, CPU, B)),  # the stage in the middle shares its samples between fp16 and fp32
        (in_parts, (A, B, B, CPU)),  # a stage in bf16, one in fp16 that lies in parts, a replica in fp32
    ],
)
def test_precisions_in_one_job(pool: Pool, spread: Any, devices: tuple[str, ...], tmp_path: Path) -> None:
    graph = captured("gpt2")
    exact, mixed = (
        pool.run(4, trained, graph, spread(graph), precision, tmp_path / name, devices=devices)
        for name, precision in (("fp32", "fp32"), ("mixed", MIXED))
    )
    assert all(losses == mixed[0] for losses in mixed)
    assert mixed[0] != exact[0]
    assert mixed[0] == pytest.approx(exact[0], rel=1e-2)


Overflows = list[tuple[float, bool, bool, float]]


def overflowing(world: World, graph: ModelGraph, spread: Spread) -> tuple[Overflows, dict[str, Tensor]]:
    """The scale is made too large for fp16: for each step the scale, whether it was skipped, whether a weight moved, and the next; and
    the weights at the end.
    """
    worker = worker_under(world, build(graph, SAMPLES), spread, precision=MIXED)
    batch = build(graph, SAMPLES).batch
    state = dict(worker.state.state_dict())
    state["loss_scale"] = {"value": 2.0**24, "good": 1999.0}
    worker.state.load_state_dict(state)
    found = []
    for _ in range(14):
        before = copied({n: p for n, p in worker.module.named_parameters() if not p.is_meta})
        result = worker.step(batch)
        after = copied({n: p for n, p in worker.module.named_parameters() if not p.is_meta})
        moved = any(not torch.equal(before[n], after[n]) for n in before)
        assert result.scale is not None
        assert (result.fault is not None) == result.overflow
        found.append((result.scale, result.overflow, moved, worker.state.state_dict()["loss_scale"]["value"]))
    weights = copied({n: p for n, p in worker.module.named_parameters() if not p.is_meta})
    worker.close()
    return found, weights


def test_an_overflow_on_one_rank_is_skipped_by_all_and_halves_the_scale(pool: Pool) -> None:
    """Three replicas, of which only one computes in fp16."""
    graph = captured("gpt2")
    steps, weights = zip(*pool.run(4, overflowing, graph, whole(graph), devices=(CPU, A, B, A)), strict=True)
    assert weights[1].keys() == weights[2].keys() != set()
    assert all(torch.equal(weights[1][name], weights[2][name]) for name in weights[1]), "replicas in bf16 and in fp16"
    for found in steps:
        skipped = [overflow for _, overflow, _, _ in found]
        assert skipped == [overflow for _, overflow, _, _ in steps[0]]
        assert skipped[0]
        assert not skipped[-1]
        for scale, overflow, _, then in found:
            assert then == (scale / 2 if overflow else scale)
    for rank in (1, 2):
        assert all(moved != overflow for _, overflow, moved, _ in steps[rank])


def sent(world: World, graph: ModelGraph, spread: Spread, precision: Any) -> int:
    """Bytes that this rank has sent to other stages in a step."""
    worker = worker_under(world, build(graph, SAMPLES), spread, precision=precision)
    batch = build(graph, SAMPLES).batch
    worker.step(batch)
    found: list[int] = []
    send = dist.isend

    def counted(tensor: Tensor, *args: Any, **options: Any) -> Any:
        found.append(tensor.nbytes)
        return send(tensor, *args, **options)

    with mock.patch.object(dist, "isend", counted):
        worker.step(batch)
    worker.close()
    return sum(found)


def test_activations_and_their_gradients_go_in_the_narrower_precision(pool: Pool) -> None:
    graph = captured("gpt2")
    wide, narrow, mixed = (
        pool.run(4, sent, graph, chain(graph), precision, devices=(A, B, CPU, B))
        for precision in ("fp32", "bf16", MIXED)
    )
    assert all(wide)
    assert narrow == [each / 2 for each in wide]
    # Between the stage in the middle, half of which computes in fp32, and the last one in fp16, too.
    assert mixed == narrow

"""State sharded over accelerators of one vendor, of two, and beside CPUs, in fp32 and in 16 bits with fp32 masters."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from device.test_exactness import CPU, FLEETS, A, B
from heterodyne.graph.ir import ModelGraph
from heterodyne.runtime.worker import Worker
from multiprocess.models import build, captured
from multiprocess.pool import Pool, World
from multiprocess.test_state_sharding import layered, replicas, sharded
from multiprocess.test_training_pipelines import SAMPLES, Spread, worker_under
from multiprocess.work import go_on, save

MIXED: dict[str, Any] = {A: "bf16", B: "fp16", CPU: "fp32"}


def on_host(spread: Spread, *ranks: int) -> Spread:
    """The hosts of these ranks keep their state."""
    schedule, pipelines = spread
    return schedule, tuple(
        replace(p, stages=tuple(replace(s, offload=not set(ranks).isdisjoint(s.ranks)) for s in p.stages))
        for p in pipelines
    )


def worker_in(world: World, graph: ModelGraph, spread: Spread, precision: Any, zero: int) -> Worker:
    return worker_under(world, build(graph, SAMPLES), spread, precision=precision, zero=zero)


def trained(
    world: World, graph: ModelGraph, spread: Spread, precision: Any, folder: Path | None, zero: int = 1
) -> list[float]:
    """Losses of four steps, with sharded state where there is a folder: there the last two again, bit for bit, from a checkpoint."""
    batch = build(graph, SAMPLES).batch
    worker = worker_in(world, graph, spread, precision, zero if folder is not None else 0)
    losses = [worker.step(batch).loss for _ in range(2)]
    if folder is not None:
        save(worker, folder)
    losses += [worker.step(batch).loss for _ in range(2)]
    worker.close()
    if folder is not None:
        resumed = worker_in(world, graph, spread, precision, zero)
        go_on(resumed, folder)
        assert [resumed.step(batch).loss for _ in range(2)] == losses[2:]
        resumed.close()
    return losses


@pytest.mark.parametrize(
    ("spread", "zero", "precision", "devices", "shares"),
    [
        (replicas, 1, "fp32", FLEETS[0], (1, 1, 1)),
        (replicas, 1, "mixed", FLEETS[2], (2, 0, 3)),
        (replicas, 2, "mixed", FLEETS[0], (2, 0, 3)),
        (layered, 3, "fp32", FLEETS[0], (1, 1, 1)),
        (layered, 3, "mixed", FLEETS[2], (2, 0, 3)),
    ],
)
def test_training_is_that_of_whole_state(
    pool: Pool,
    spread: Any,
    zero: int,
    precision: str,
    devices: tuple[str, ...],
    shares: tuple[int, ...],
    tmp_path: Path,
) -> None:
    graph = captured("gpt2")
    of_each = MIXED if precision == "mixed" else precision
    whole = pool.run(3, trained, graph, spread(graph), of_each, None, devices=devices)
    parts = pool.run(3, trained, graph, sharded(spread(graph), *shares), of_each, tmp_path, zero, devices=devices)
    assert all(losses == parts[0] for losses in parts)
    assert parts[0] == pytest.approx(whole[0], rel=1e-5 if precision == "fp32" else 1e-4)


def kept_where(
    world: World, graph: ModelGraph, spread: Spread, precision: Any, zero: int
) -> tuple[list[float], set[str]]:
    """Losses, and the types of devices on which the optimizer's state is."""
    batch = build(graph, SAMPLES).batch
    worker = worker_in(world, graph, spread, precision, zero)
    losses = [worker.step(batch).loss for _ in range(2)]
    state = worker.state.state_dict()
    where = {t.device.type for of in worker.optimizer.state.values() for t in of.values() if t.dim()}
    worker.close()
    again = worker_in(world, graph, spread, precision, zero)
    again.state.load_state_dict(state)
    losses.append(again.step(batch).loss)
    again.close()
    return losses, where


@pytest.mark.parametrize(("precision", "zero"), [("fp32", 1), ("mixed", 0)])
def test_hosts_keep_the_state_of_devices(pool: Pool, precision: str, zero: int) -> None:
    graph, devices = captured("gpt2"), (A, A, B)
    of_each = MIXED if precision == "mixed" else precision
    spread = sharded(replicas(graph), 1, 2, 3) if zero else replicas(graph)
    here = pool.run(3, kept_where, graph, spread, of_each, zero, devices=devices)
    there = pool.run(3, kept_where, graph, on_host(spread, 0, 2), of_each, zero, devices=devices)
    for (losses, _), (expected, _) in zip(there, here, strict=True):
        assert losses == pytest.approx(expected, rel=1e-5 if precision == "fp32" else 1e-4)
    assert [where for _, where in there] == [{"cpu"}, {A}, {"cpu"}]

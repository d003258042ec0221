"""Optimizer state that the devices with the same weights share out: training goes where one device goes, whatever the shares."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from heterodyne.graph.ir import ModelGraph
from heterodyne.job import OptimizerSection
from heterodyne.plan.check import violations
from heterodyne.plan.kept import names_of
from heterodyne.runtime.exact.verify import compare
from multiprocess.models import build, captured
from multiprocess.pool import Pool, World
from multiprocess.test_training_pipelines import (
    ADAMW,
    SAMPLES,
    Spread,
    cut,
    in_parts,
    meshed,
    take_over,
    train,
    train_on_one_device,
    unlike,
    worker_under,
)
from multiprocess.test_whole_weight_optimizers import FACTORIES
from multiprocess.work import PipelineOf, StageOf, cluster_of, copied, staged_plan

BAR, STEPS = 1e-5, 3
ADAFACTOR = OptimizerSection(name="adafactor", lr=1e-2)
SGD = OptimizerSection(name="sgd", lr=0.1, momentum=0.9)


def sharded(spread: Spread, *shares: int) -> Spread:
    """Each rank keeps so much of the state."""
    schedule, pipelines = spread
    return schedule, tuple(
        replace(
            pipeline,
            stages=tuple(
                replace(stage, state=tuple(shares[rank] for rank in stage.ranks)) for stage in pipeline.stages
            ),
        )
        for pipeline in pipelines
    )


def replicas(graph: ModelGraph) -> Spread:
    """A pipeline for each device, one of them without a sample, and an idle device."""
    ops = len(graph.ops)
    return "1F1B", tuple(
        PipelineOf(sizes, (StageOf(ops, (rank,), (1,)),)) for rank, sizes in enumerate([(3, 2), (4,), ()])
    )


def wide(graph: ModelGraph) -> Spread:
    """Two stages of two devices each, which hold the same weights."""
    return "1F1B", (PipelineOf((2, 2, 3, 2), cut(graph, (0.5,), ((0, 1), (2, 3)))),)


def layered(graph: ModelGraph) -> Spread:
    """All stages on the same three devices, one after the other; one of them is without a sample, and a fourth is idle."""
    stages = cut(graph, (0.2, 0.5, 0.8), ((0, 1, 2),) * 4)
    return "GPipe", (PipelineOf((3, 4, 2), tuple(replace(stage, shares=(2, 0, 1)) for stage in stages)),)


def deep(graph: ModelGraph) -> Spread:
    """Three pipelines, each on one device, which gather one block after the other; cut in two ways, with 4, 2 and no micro-batches."""
    cuts = [(0.3, 0.6), (0.3, 0.6), (0.2, 0.5, 0.8)]
    sizes = [(2, 1, 1, 1), (3, 1), ()]
    return "GPipe", tuple(
        PipelineOf(of, cut(graph, at, ((rank,),) * (1 + len(at))))
        for rank, (of, at) in enumerate(zip(sizes, cuts, strict=True))
    )


def recomputed(graph: ModelGraph) -> Spread:
    """The same on four devices, whose hosts keep the state; everything is recomputed but some products, or waits on the hosts."""
    stages = []
    for stage in cut(graph, (0.08, 0.95), ((3, 1, 2, 0),) * 3, recompute=True):
        hosted, again = stage.recompute[-1:], stage.recompute[:-1]
        names = [name for n in again for name in names_of(graph, graph.blocks[n]) if name.endswith(("addmm", "linear"))]
        stages.append(replace(stage, offload=True, recompute=again, keep=tuple(dict.fromkeys(names)), hosted=hosted))
    assert any(stage.keep and stage.hosted for stage in stages)
    return "GPipe", (PipelineOf((4, 5), tuple(stages)),)


@pytest.mark.parametrize(
    ("name", "spread", "zero", "shares", "bucket_bytes", "section"),
    [
        ("gpt2", replicas, 2, (3, 0, 2), 2**20, SGD),
        ("t5", replicas, 1, (1, 5, 7), 1, ADAMW),
        ("gpt2", wide, 3, (0, 1, 5, 3), 3000, ADAMW),
        ("gpt2", unlike, 2, (2, 3, 1, 5), 4096, SGD),
        ("gpt2", meshed, 3, (1, 2, 4, 3), 4096, ADAMW),
        ("gpt2", unlike, 1, (1, 2, 4, 3), 4096, ADAFACTOR),
        ("gpt2", layered, 3, (3, 0, 2), 2**20, ADAMW),
        ("t5", layered, 3, (1, 5, 7), 1, ADAFACTOR),
        ("seen", layered, 3, (3, 0, 2), 1, ADAMW),
        ("seen", wide, 3, (0, 1, 5, 3), 1, SGD),
        ("gpt2", recomputed, 3, (2, 3, 1, 5), 4096, ADAMW),
        ("gpt2", replicas, 3, (3, 0, 2), 2**20, ADAMW),
        ("t5", unlike, 3, (2, 3, 1, 5), 4096, SGD),
        ("gpt2", deep, 3, (1, 3, 2), 4096, ADAMW),
    ],
)
def test_training_goes_where_one_device_goes(
    pool: Pool,
    name: str,
    spread: Any,
    zero: int,
    shares: tuple[int, ...],
    bucket_bytes: int,
    section: OptimizerSection,
) -> None:
    graph = captured(name)
    made = sharded(spread(graph), *shares)
    losses, norms, state = train_on_one_device(graph, made, STEPS, section)
    how = {"bucket_bytes": bucket_bytes, "zero": zero, "reach": section.reach}
    found = pool.run(4, train, graph, made, STEPS, section, how)
    for got, of_norm, weights, _ in found:
        assert got == pytest.approx(losses, rel=BAR)
        assert [n for n in of_norm if n is not None] == pytest.approx(norms if of_norm[0] is not None else [], rel=BAR)
        assert compare(0.0, weights, 0.0, state).largest <= BAR
        assert {n: t.shape for n, t in weights.items()} == {n: t.shape for n, t in state.items()}
    if spread is replicas:
        trained = sum(p.numel() for p in build(graph, 1).module.parameters())
        assert [kept for *_, kept in found[:3]] == pytest.approx(
            [trained * share / sum(shares) for share in shares], abs=len(graph.parameters)
        )
        assert found[3][3] == 0


def gradients_of(world: World, graph: ModelGraph, spread: Spread, zero: int) -> tuple[float, dict[str, Tensor]]:
    case = build(graph, SAMPLES)
    worker = worker_under(world, case, spread, zero=zero)
    loss, gradients = worker.gradients(case.batch, 1)
    found = copied(gradients)
    worker.close()
    return loss, found


@pytest.mark.parametrize(("spread", "zero"), [(replicas, 1), (replicas, 2), (layered, 3)])
def test_gradients_can_be_asked_for_whole(pool: Pool, spread: Any, zero: int) -> None:
    graph = captured("gpt2")
    made = sharded(spread(graph), 3, 1, 2)
    by_rank = pool.run(4, gradients_of, graph, made, zero)
    for loss, gradients in by_rank[1:3]:
        assert compare(loss, gradients, *by_rank[0]).largest == 0
    assert by_rank[0][1].keys() == {p.name for p in graph.parameters if p.trainable}


def evaluated(world: World, graph: ModelGraph, spread: Spread, zero: int) -> list[float]:
    worker = worker_under(world, build(graph, SAMPLES), spread, zero=zero)
    losses = [worker.evaluate(build(graph, size).batch) for size in (SAMPLES, 7, 2)]
    worker.close()
    return losses


@pytest.mark.parametrize("spread", [deep, unlike])
def test_evaluation_gathers_parameters_whatever_parts_each_pipeline_has(pool: Pool, spread: Any) -> None:
    graph = captured("gpt2")
    plain, made = spread(graph), sharded(spread(graph), 1, 3, 2, 1)
    for losses, wanted in zip(
        pool.run(4, evaluated, graph, made, 3), pool.run(4, evaluated, graph, plain, 0), strict=True
    ):
        assert losses == pytest.approx(wanted, rel=BAR)


@pytest.mark.parametrize(("spread", "zero"), [(replicas, 2), (meshed, 1), (layered, 3)])
def test_a_resumed_run_changes_no_bit(pool: Pool, spread: Any, zero: int, tmp_path: Path) -> None:
    graph = captured("gpt2")
    made = sharded(spread(graph), 1, 2, 4, 3)
    for undisturbed, resumed in pool.run(4, take_over, graph, made, made, tmp_path, (zero, zero)):
        assert resumed == undisturbed


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ((wide, 1), (meshed, 1)),
        ((meshed, 1), (unlike, 1)),
        ((unlike, 1), (recomputed, 3)),
        ((layered, 3), (replicas, 2)),
        ((deep, 3), (unlike, 3)),
    ],
)
def test_another_plan_goes_on_from_a_checkpoint(pool: Pool, before: Any, after: Any, tmp_path: Path) -> None:
    graph = captured("gpt2")
    (first, of_first), (second, of_second) = before, after
    for undisturbed, resumed in pool.run(
        4, take_over, graph, first(graph), second(graph), tmp_path, (of_first, of_second)
    ):
        assert resumed == pytest.approx(undisturbed, rel=BAR)


def test_what_cannot_be_sharded_is_refused() -> None:
    graph, cluster = captured("gpt2"), cluster_of(4)

    def faults(spread: Spread, zero: int) -> str:
        return "; ".join(violations(staged_plan(graph, cluster, spread[1], spread[0], zero=zero), graph, cluster))

    assert "in different ways, so that its state cannot be sharded" in faults(in_parts(graph), 1)
    assert "no two devices do: leave 'zero' out" in faults(("1F1B", alone(graph)), 1)
    assert not faults(replicas(graph), 3)
    assert "write 'zero': 1, or leave them out" in faults(sharded(replicas(graph), 1, 2, 3), 0)


def alone(graph: ModelGraph) -> tuple[PipelineOf, ...]:
    return (PipelineOf((9,), cut(graph, (), ((0,),))),)


@pytest.mark.parametrize("spread", [replicas, unlike])
def test_an_update_on_the_host_changes_no_bit(pool: Pool, spread: Any) -> None:
    graph = captured("gpt2")
    here = sharded(spread(graph), 1, 2, 4, 3)
    there = (here[0], tuple(replace(p, stages=tuple(replace(s, offload=True) for s in p.stages)) for p in here[1]))
    expected = pool.run(4, train, graph, here, STEPS, ADAMW, {"zero": 1})
    for (losses, norms, state, kept), wanted in zip(
        pool.run(4, train, graph, there, STEPS, ADAMW, {"zero": 1}), expected, strict=True
    ):
        assert (losses, norms, kept) == (wanted[0], wanted[1], wanted[3])
        assert compare(0.0, state, 0.0, wanted[2]).largest == 0


def of_whole_weights(world: World, graph: ModelGraph, spread: Spread, name: str, zero: int) -> list[float]:
    case = build(graph, SAMPLES)
    worker = worker_under(world, case, spread, FACTORIES[name], zero=zero, reach="weight")
    losses = [worker.step(case.batch).loss for _ in range(STEPS)]
    state = worker.state.state_dict()
    assert state["optimizer"].keys() <= {p.name for p in graph.parameters}
    worker.state.load_state_dict(state)
    losses.append(worker.step(case.batch).loss)
    worker.close()
    return losses


@pytest.mark.parametrize("name", FACTORIES)
def test_optimizers_of_whole_weights_keep_them_whole(pool: Pool, name: str) -> None:
    """Each weight is updated by one device, which has all of it."""
    graph = captured("gpt2")
    made = sharded(replicas(graph), 3, 1, 2)
    whole = pool.run(4, of_whole_weights, graph, made, name, 1)
    assert all(losses == whole[0] for losses in whole)
    bare = ("1F1B", tuple(replace(p, stages=tuple(replace(s, state=None) for s in p.stages)) for p in made[1]))
    assert whole[0] == pytest.approx(pool.run(4, of_whole_weights, graph, bare, name, 0)[0], rel=BAR)


def replaced(world: World, graph: ModelGraph, spread: Spread, zero: int) -> tuple[bool, list[float]]:
    """Whether weights that were put in the place of the trained ones are what the optimizer goes on from; the losses after that."""
    case = build(graph, SAMPLES)
    worker = worker_under(world, case, spread, SGD, zero=zero)
    worker.step(case.batch)
    names = [parameter.name for parameter in graph.parameters if parameter.trainable]
    values = {name: 0.9 * value.float() for name, value in worker.state.updated(names).items()}
    with worker.state.lent():
        worker.state.put(values)
    again = copied(worker.state.updated(names))
    alike = all(again[name].equal(value) for name, value in values.items())
    losses = [worker.step(case.batch).loss for _ in range(2)]
    worker.close()
    return alike, losses


def test_weights_are_read_and_replaced_whole_whatever_each_rank_updates(pool: Pool) -> None:
    """As outer steps of sites do, between two steps."""
    graph = captured("gpt2")
    wanted = pool.run(4, replaced, graph, replicas(graph), 0)[0]
    assert wanted[0]
    for spread, zero, shares in ((replicas, 2, (3, 0, 2)), (wide, 3, (0, 1, 5, 3)), (meshed, 3, (1, 2, 4, 3))):
        for alike, losses in pool.run(4, replaced, graph, sharded(spread(graph), *shares), zero):
            assert alike
            assert losses == pytest.approx(wanted[1], rel=BAR)

"""Pipelines cut again for their devices: shorter cuts, within memory, with devices that were left over."""

from __future__ import annotations

from itertools import combinations, pairwise

import pytest

from heterodyne.cluster import Link
from heterodyne.cost.memory import MemoryAssumptions
from heterodyne.cost.model import CostModel
from heterodyne.plan import MicroBatches, Pipeline
from heterodyne.search.finer_cuts import FinerCuts, made_of
from heterodyne.search.orders import peak_of_all_kept
from heterodyne.search.points import points_of
from heterodyne.search.predict import plan_of
from heterodyne.search.refine import Refiner
from pure.build import cluster, graph, linear, profile

BARE = MemoryAssumptions(context_bytes={"cpu": 0}, fragmentation=0.0, block_bytes=0)
LINK = Link(between=("n0", "n0"), bandwidth_bytes_per_s=1e12, latency_s=0.0)


def believed(speeds: list[float], *, memory: list[int] | int = 2**36, layers: int = 8, saved: int = 1000) -> CostModel:
    model, machines = graph(layers, saved=saved), cluster(len(speeds), memory=memory, link=LINK)
    measured = profile(model, machines, [linear(1 / speed) for speed in speeds])
    return CostModel(graph=model, cluster=machines, profile=measured, memory=BARE)


def even(model: CostModel, ranks: int, micro_batches: MicroBatches) -> Pipeline:
    return FinerCuts(model=model).even([d.id for d in model.cluster.devices][:ranks], micro_batches)


def peaks(model: CostModel, pipeline: Pipeline) -> list[int]:
    """Of each rank under 1F1B."""
    costs = model.of(plan_of(model, pipeline.micro_batches.samples, (pipeline,)))
    ranks = len(pipeline.stages)
    in_flight = [min(len(pipeline.micro_batches), ranks - rank) for rank in range(ranks)]
    ordered = [costs.ranks[model.cluster.rank(stage.devices[0])] for stage in pipeline.stages]
    return [peak_of_all_kept(rank, in_flight) for rank in ordered if rank is not None]


@pytest.mark.parametrize("speeds", [[1.0, 1.0, 1.0], [0.7, 0.35, 0.2], [0.2, 1.0, 0.5]])
def test_no_cut_of_the_same_line_has_a_faster_bottleneck(speeds: list[float]) -> None:
    """With so many micro-batches that nothing else counts."""
    model, many = believed(speeds, layers=4), MicroBatches((1,) * 64)
    cuts, line = FinerCuts(model=model), [device.id for device in model.cluster.devices]
    positions = cuts.points.positions
    every = [
        cuts.longest_s(made_of(many, line, [0, *(positions[n] for n in inner), positions[-1]]))
        for inner in combinations(range(1, len(positions) - 1), len(line) - 1)
    ]
    shapes = cuts.shapes(even(model, 3, many))
    found = [shape for shape in shapes if [stage.devices[0] for stage in shape.stages] == line]
    assert min(map(cuts.longest_s, found)) == pytest.approx(min(every))


def test_blocks_are_cut_inside_where_that_balances_devices() -> None:
    model, micro_batches = believed([1.0, 1.0], layers=3), MicroBatches((1,) * 8)
    borders = set(points_of(model.graph).positions)
    shape = next(FinerCuts(model=model).shapes(even(model, 2, micro_batches)))
    assert not {stage.ops[1] for stage in shape.stages} <= borders


def test_a_rank_that_lacks_memory_gets_less() -> None:
    roomy, micro_batches = believed([1.0, 1.0, 1.0], saved=20_000), MicroBatches((1,) * 6)
    first = next(FinerCuts(model=roomy).shapes(even(roomy, 3, micro_batches)))
    most = peaks(roomy, first)
    memory = [int(0.8 * most[0]), 2 * most[1], 2 * most[2]]
    tight = believed([1.0, 1.0, 1.0], saved=20_000, memory=memory)
    shapes = [s for s in FinerCuts(model=tight).shapes(even(tight, 3, micro_batches)) if len(s.stages) == 3]
    fitting = [s for s in shapes if all(a <= b for a, b in zip(peaks(tight, s), memory, strict=True))]
    assert fitting
    assert all(stage.recompute == () for shape in fitting for stage in shape.stages)


def test_a_device_that_was_left_over_joins_where_that_is_faster() -> None:
    model, micro_batches = believed([1.0, 1.0, 1.0, 1.0]), MicroBatches((1,) * 32)
    idle = model.cluster.devices[3].id
    plan = plan_of(model, 32, (even(model, 3, micro_batches),))
    _, (found,) = next(Refiner(model=model).plans(plan))
    assert idle in plan.idle
    assert idle in {device for place in found.places for device in place}
    assert [a.ops[1] for a, _ in pairwise(found.stages)] == [b.ops[0] for _, b in pairwise(found.stages)]


def test_alike_pipelines_are_refined_once_and_each_on_its_own_devices() -> None:
    model, micro_batches = believed([1.0, 0.5, 1.0, 0.5]), MicroBatches((1,) * 8)
    ids = [device.id for device in model.cluster.devices]
    cuts = FinerCuts(model=model)
    plan = plan_of(model, 16, tuple(cuts.even(line, micro_batches) for line in (ids[:2], ids[2:])))
    _, (one, other) = next(Refiner(model=model).plans(plan))
    assert [stage.ops for stage in one.stages] == [stage.ops for stage in other.stages]
    assert {d for place in one.places for d in place} == set(ids[:2])
    assert {d for place in other.places for d in place} == set(ids[2:])

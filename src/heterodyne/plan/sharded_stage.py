"""How the tensors of a stage are laid out on its devices, worked out from the plan.

The plan says for each TaskGraph how it is laid out (`Region`). Which weights are cut where, and what is exchanged, follows from that and
from the graph alone, so all ranks and the planner find the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache

from heterodyne.errors import PlanError
from heterodyne.graph.cut import crossings, stage_ops
from heterodyne.graph.ir import ModelGraph, Op, Ref
from heterodyne.graph.module_outputs import without_module_outputs
from heterodyne.graph.sharding import COPY, PARTIAL, Layout, Mode, Price, Problem, Sharding, shard, shard_along, sharded
from heterodyne.graph.size import Size
from heterodyne.plan.plan import Pipeline, Stage

__all__ = ["problem_of", "shard_stage"]


Fixed = dict[tuple[Ref, Layout], Size]


def shard_stage(graph: ModelGraph, pipeline: Pipeline, number: int) -> Sharding | None:
    """Return how stage ``number`` of a pipeline is laid out on the devices of each of its rows; None where these only share the samples.

    Raises PlanError for tensors at its borders out of which no samples can be cut.
    """
    stage = pipeline.stages[number]
    if not stage.sharded:
        return None
    # All that matters: who the devices are, and what they do besides, changes nothing, and working it out takes a while.
    row = stage.of_row
    plain = Stage(
        ops=row.ops, devices=tuple(map(str, range(len(row.devices)))), regions=row.regions, exchange=row.exchange
    )
    starts = tuple(each.ops[0] for each in pipeline.stages)
    return _solved(graph, plain, starts, number, _most_samples(pipeline, number))


@lru_cache(maxsize=256)
def _solved(graph: ModelGraph, stage: Stage, starts: tuple[int, ...], number: int, samples: int) -> Sharding:
    plain = without_module_outputs(graph)
    first, stop = stage.ops
    stage = stage.model_copy(update={"ops": (plain.before[first], plain.before[stop])})
    starts = tuple(plain.before[start] for start in starts)
    axes = range(len(stage.layout.axes))
    asked = [problem_of(plain.graph, _along(stage, axis), starts, number, samples) for axis in axes]
    found = shard_along([problem for problem, _, _ in asked], lambda problem, axis: shard(problem, *asked[axis][1:]))
    return found.showing(graph, plain.shown)


def problem_of(
    graph: ModelGraph, stage: Stage, starts: tuple[int, ...], number: int, samples: int
) -> tuple[Problem, tuple[tuple[int, ...], ...], Fixed]:
    """Return what has to be solved for a stage along its one axis, the lists of shares, and the units that its neighbours have fixed."""
    regions = sorted(stage.regions, key=lambda region: region.task_graph != "*")
    by_name = {region.task_graph: place for place, region in enumerate(regions)}
    ops = stage_ops(graph, *stage.ops)
    given, wanted = _borders(graph, starts, number)
    problem = Problem(
        graph=graph,
        ops=ops,
        modes={op.name: _mode(op, stage, by_name) for op in ops},
        given=given,
        wanted=wanted,
        samples=samples,
        price=_price(stage),
    )
    borders = {**given, **wanted}
    fixed = {(ref, layout): Size.per_sample(1) for ref, layout in borders.items() if layout.kind == "shard"}
    return problem, tuple(region.layout.shares for region in regions), fixed


def _along(stage: Stage, axis: int) -> Stage:
    """The stage as if it had that axis alone."""
    regions = tuple(
        region.model_copy(update={"layout": region.layout.within(axis).model_copy(update={"inner": ()})})
        for region in stage.regions
    )
    return stage.model_copy(update={"devices": stage.devices[: stage.layout.sizes[axis]], "regions": regions})


def _most_samples(pipeline: Pipeline, number: int) -> int:
    """The most samples of a micro-batch on a row."""
    sizes = set(pipeline.micro_batches.sizes)
    return max((count for size in sizes for _, count in pipeline.stages[number].row_slices(size)), default=1)


def _mode(op: Op, stage: Stage, by_name: Mapping[str, int]) -> Mode:
    place = by_name.get(op.annotation or "*", 0)
    regions = sorted(stage.regions, key=lambda region: region.task_graph != "*")
    return Mode(regions[place].layout.kind, place)


def _price(stage: Stage) -> Price:
    shares = [share for share in stage.shares if share > 0]
    return Price(
        members=len(stage.devices),
        unevenness=sum(shares) / min(shares),
        latency_bytes=stage.exchange.latency_bytes,
        flops_per_byte=stage.exchange.flops_per_byte,
    )


def _borders(graph: ModelGraph, starts: Sequence[int], number: int) -> tuple[dict[Ref, Layout], dict[Ref, Layout]]:
    """Return what the stage receives and sends, by samples as its devices share them; and the loss, in parts."""
    given: dict[Ref, Layout] = {}
    wanted: dict[Ref, Layout] = {}
    for crossing in crossings(graph, starts):
        into = given if number in crossing.consumers else wanted if number == crossing.producer else None
        if into is not None:
            op = graph.op_by_name[crossing.name]
            into.update({Ref(op.name, place): _at_the_border(op, place, number) for place in range(len(op.outputs))})
    if number == len(starts) - 1:
        wanted[graph.output or Ref(graph.ops[-1].name)] = PARTIAL
    return given, wanted


def _at_the_border(op: Op, place: int, number: int) -> Layout:
    dim = op.samples[place] if op.samples else None  # a graph need not tell
    if dim is not None:
        return sharded(dim)
    if all(size.is_constant for size in op.outputs[place].shape):
        return COPY
    raise PlanError(
        f"{op.name} ({op.source}) crosses into or out of stage {number}, which is sharded over several devices, and samples cannot be "
        "cut out of it: give both stages one device each, or cut elsewhere"
    )

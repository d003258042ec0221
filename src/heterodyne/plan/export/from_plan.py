"""From a Plan to an even one, for plans that are: every share equal, every stage as wide as the others, every pipeline the same."""

from __future__ import annotations

import re
from collections import Counter
from itertools import chain
from math import prod
from typing import Final, Literal, TypeAlias

from heterodyne.errors import PlanError
from heterodyne.graph import Block, ModelGraph, Op
from heterodyne.graph.ir import Ref
from heterodyne.plan.export.even_plan import EvenPlan, ModelShape
from heterodyne.plan.mesh import Kind
from heterodyne.plan.plan import Layout, Pipeline, Plan, Stage
from heterodyne.plan.precision import Precision, in_words
from heterodyne.plan.schedules import SCHEDULES
from heterodyne.plan.state_shards import state_shares

__all__ = ["even_plan", "model_shape"]

_DEGREE: Final = {"replicate": "dp", "split": "tp", "context": "cp"}


def even_plan(plan: Plan, graph: ModelGraph) -> EvenPlan:
    """The plan in the words that other frameworks have. Raises PlanError with the first stage that is not like the others, and why."""
    if plan.model != graph.fingerprint:
        raise PlanError("the plan was made for another model; plan again with 'heterodyne plan'")
    if not plan.pipelines:
        raise PlanError("the plan has no pipeline")
    first = plan.pipelines[0]
    _require_whole(first, graph)
    _require_alike(plan)
    axes = _layout(first)
    sizes = first.micro_batches.sizes
    if not sizes or len(set(sizes)) > 1:
        raise PlanError(
            f"pipeline 0 has micro-batches of unequal sizes ({first.micro_batches}); other frameworks have one size"
        )
    copies = prod(members for kind, members in axes if kind == "replicate")
    if sizes[0] % copies:
        raise PlanError(
            f"stage 0: micro-batches of {sizes[0]} samples cannot be shared out evenly over {copies} devices"
        )
    layers, again = _layers(first, graph)
    places = len(first.places)
    degrees = {"dp": len(plan.pipelines), "tp": 1, "cp": 1}
    for kind, members in axes:
        degrees[_DEGREE[kind]] *= members
    return EvenPlan(
        **degrees,
        pp=places,
        vpp=_stages_a_place(plan, first),
        zero_stage=_zero_stage(plan),
        micro_batch_size=sizes[0] // copies,
        global_batch_size=plan.global_batch_size,
        layers_per_stage=layers,
        recomputed_layers=again,
        schedule=plan.schedule,
        precision=_one_precision(plan),
        shape=model_shape(graph),
        notes=_notes(plan),
    )


def _one_precision(plan: Plan) -> Precision:
    if isinstance(plan.precision, str):
        return plan.precision
    raise PlanError(
        f"other frameworks train in one precision, and the plan has {in_words(plan.precision)}: plan with precision fp16"
    )


def _require_whole(pipeline: Pipeline, graph: ModelGraph) -> None:
    done = 0
    for index, stage in enumerate(pipeline.stages):
        if not stage.devices:
            raise PlanError(f"stage {index} has no device")
        if stage.ops[0] != done or stage.ops[1] < done:
            raise PlanError(f"stage {index} runs ops {stage.ops[0]} to {stage.ops[1]}, the ones before end at {done}")
        done = stage.ops[1]
    if done != len(graph.ops):
        raise PlanError(f"the stages end at op {done}, the model has {len(graph.ops)}")


def _require_alike(plan: Plan) -> None:
    first = plan.pipelines[0]
    for number, pipeline in enumerate(plan.pipelines[1:], start=1):
        if pipeline.micro_batches != first.micro_batches:
            raise PlanError(
                f"pipeline {number} takes {pipeline.micro_batches} and pipeline 0 {first.micro_batches}; others give each the same"
            )
        if len(pipeline.stages) != len(first.stages):
            raise PlanError(f"pipeline {number} has {len(pipeline.stages)} stages and pipeline 0 {len(first.stages)}")
        if pipeline.place_of_stage != first.place_of_stage:
            raise PlanError(f"pipeline {number} puts its stages on its places in another way than pipeline 0")
        for index, (stage, other) in enumerate(zip(pipeline.stages, first.stages, strict=True)):
            here = f"pipeline {number} stage {index}"
            if stage.ops != other.ops:
                raise PlanError(
                    f"{here} runs ops {stage.ops} and that of pipeline 0 {other.ops}; other frameworks cut all pipelines alike"
                )
            if len(stage.devices) != len(other.devices) or _kinds(stage) != _kinds(other):
                raise PlanError(
                    f"{here} is laid out otherwise on {len(stage.devices)} devices than that of pipeline 0 on {len(other.devices)}"
                )
            if (
                stage.recompute != other.recompute
                or stage.keep != other.keep
                or stage.state_shares != other.state_shares
            ):
                raise PlanError(
                    f"{here} computes other blocks again, or shares out its states otherwise, than that of pipeline 0"
                )
        _layout(pipeline, f"pipeline {number} ")


_Axes: TypeAlias = tuple[tuple[Kind, int], ...]
"""The kinds of the axes, outermost first, and their numbers of members; those of one member are left out."""


def _axes(layout: Layout) -> _Axes:
    return tuple((axis.kind, len(axis.shares)) for axis in layout.axes if len(axis.shares) > 1)


def _kinds(stage: Stage) -> list[tuple[str, _Axes]]:
    return sorted((region.task_graph, _axes(region.layout)) for region in stage.regions)


def _layout(pipeline: Pipeline, prefix: str = "") -> _Axes:
    """Return how all the stages are laid out on their devices."""
    width = len(pipeline.stages[0].devices)
    kinds: dict[_Axes, int] = {}
    for index, stage in enumerate(pipeline.stages):
        here = f"{prefix}stage {index}"
        if len(stage.devices) != width:
            raise PlanError(
                f"{here} is on {len(stage.devices)} devices, stage 0 on {width}; other frameworks have one width"
            )
        for region in stage.regions:
            name = "" if region.task_graph == "*" else f" in {region.task_graph!r}"
            for axis in region.layout.axes:
                if len(set(axis.shares)) > 1 or not all(axis.shares):
                    said = ":".join(map(str, axis.shares))
                    raise PlanError(
                        f"{here} has unequal shares{name} ({said}); other frameworks give each device the same"
                    )
            kinds.setdefault(_axes(region.layout), index)
        if len(kinds) > 1:
            told = " and ".join(" x ".join(kind for kind, _ in axes) for axes in kinds)
            raise PlanError(f"{here} is {told}; other frameworks have one layout for all layers")
    return next(iter(kinds), ())


def _stages_a_place(plan: Plan, pipeline: Pipeline) -> int:
    places, stages = len(pipeline.places), len(pipeline.stages)
    if stages % places:
        raise PlanError(f"{stages} stages on {places} places: some have more than others")
    if plan.schedule not in SCHEDULES:
        raise PlanError(f"schedule {plan.schedule!r} is not known; it can be {', '.join(SCHEDULES)}")
    if SCHEDULES[plan.schedule].asynchronous:
        raise PlanError(f"{plan.schedule} trains with predicted weights, which no other framework runs; take 1F1B")
    wanted = SCHEDULES[plan.schedule].stage_places(places, stages // places)
    for index, (place, other) in enumerate(zip(pipeline.place_of_stage, wanted, strict=True)):
        if place != other:
            raise PlanError(f"stage {index} is on place {place}; {plan.schedule} has it on place {other}")
    if any(p.order for p in plan.pipelines):
        raise PlanError("a pipeline has an order of its own, which is no named schedule; take it to PyTorch as CSV")
    return stages // places


def _layers(pipeline: Pipeline, graph: ModelGraph) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """For each stage how many layers it has, and how many of them compute their activations again."""
    layers = _layer_blocks(graph)
    starts, stops = {b.start for b in graph.blocks}, {b.stop for b in graph.blocks}
    counts, again = [], []
    for index, stage in enumerate(pipeline.stages):
        start, stop = stage.ops
        if start not in starts or stop not in stops:
            inside = next((b.name for b in graph.blocks if b.start < start < b.stop or b.start < stop < b.stop), "?")
            raise PlanError(
                f"stage {index} begins or ends inside block {inside!r}; other frameworks cut between layers only"
            )
        held = [block for block in graph.blocks if start <= block.start and block.stop <= stop]
        before = [b for b in held if b.index < layers[0].index]
        after = [b for b in held if b.index > layers[-1].index]
        if (before and index > 0) or (after and index < len(pipeline.stages) - 1):
            block = (before or after)[0]
            raise PlanError(
                f"stage {index} has {block.name!r}; others keep what is before the layers in the first stage, the rest in the last"
            )
        counts.append(sum(block in layers for block in held))
        again.append(sum(block in layers and block.index in stage.recompute for block in held))
    return tuple(counts), tuple(again) if any(again) else ()


def _zero_stage(plan: Plan) -> Literal[0, 1, 2, 3]:
    """The level of state sharding. Raises PlanError for unequal shards."""
    shares = state_shares(plan)
    if plan.zero and len(set(shares.values())) > 1:
        said = ":".join(map(str, shares.values()))
        raise PlanError(f"its devices have unequal state_shares ({said}); other frameworks give each device the same")
    return plan.zero


def _notes(plan: Plan) -> tuple[str, ...]:
    notes = []
    stages = list(chain.from_iterable(pipeline.stages for pipeline in plan.pipelines))
    if plan.idle:
        notes.append(f"{len(plan.idle)} devices of the cluster take no part")
    if any(stage.overlap for stage in stages):
        notes.append(
            "the plan splits each micro-batch in two, one half communicates while the other computes; that is not exported"
        )
    if len(plan.pipelines) > 1 and plan.zero:
        notes.append("optimizer states are sharded over all replicas, not within each pipeline only")
    if any(stage.keep for stage in stages):
        notes.append("of layers that are computed again the plan keeps what some ops make; that is not exported")
    if any(stage.offload_activations for stage in stages):
        notes.append("the plan keeps activations of some blocks in host memory; that is not exported")
    if any(stage.offload for stage in stages):
        notes.append("the plan keeps optimizer state in host memory; that is not exported")
    return tuple(notes)


def _layer_blocks(graph: ModelGraph) -> tuple[Block, ...]:
    """The layers: from the first to the last block that is called like those of the kind that is there most often.

    A layer of another kind is one too, as the dense ones before those with experts. Raises PlanError if no kind repeats.
    """
    kind, count = Counter(block.kind for block in graph.blocks).most_common(1)[0]
    if count < 2:
        raise PlanError(f"model {graph.name} has no repeated layers, which other frameworks count")
    called = {_unnumbered(block.name) for block in graph.blocks if block.kind == kind}
    places = [block.index for block in graph.blocks if _unnumbered(block.name) in called]
    return graph.blocks[places[0] : places[-1] + 1]


def _unnumbered(name: str) -> str:
    return re.sub(r"[0-9]+", "#", name)


def model_shape(graph: ModelGraph) -> ModelShape:
    """Return what can be read off the ops; what cannot is None."""
    table = next((op.argument("weight") for op in graph.ops if op.kind == "embedding"), None)
    lookup = graph.stored.get(table.name) if isinstance(table, Ref) else None
    attention = next((op for op in graph.ops if op.kind == "scaled_dot_product_attention"), None)
    heads, groups = (_heads(graph, attention, operand) for operand in ("query", "key"))
    return ModelShape(
        hidden_size=lookup.shape[1] if lookup is not None else None,
        num_attention_heads=heads,
        num_query_groups=groups if groups != heads else None,  # many models repeat the keys before they attend
        sequence_length=_positions(graph, attention),
    )


def _heads(graph: ModelGraph, attention: Op | None, operand: str) -> int | None:
    """Attention is [batch, heads, positions, width of a head]."""
    return _dim(graph, attention, operand, -3)


def _positions(graph: ModelGraph, attention: Op | None) -> int | None:
    return _dim(graph, attention, "query", -2)


def _dim(graph: ModelGraph, op: Op | None, operand: str, dim: int) -> int | None:
    value = op.argument(operand) if op is not None else None
    if not isinstance(value, Ref):
        return None
    shape = graph.spec(value).shape
    if len(shape) < 4 or not shape[dim].is_constant:
        return None
    return int(shape[dim](1))

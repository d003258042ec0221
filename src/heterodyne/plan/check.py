"""Whether a plan keeps the rules, before anything starts. All violations are told, not the first one."""

from __future__ import annotations

from collections import Counter

from heterodyne.cluster.spec import Cluster
from heterodyne.errors import PlanError
from heterodyne.graph.ir import ModelGraph
from heterodyne.plan.order import orders_of
from heterodyne.plan.plan import Pipeline, Plan, Stage
from heterodyne.plan.sharded_stage import shard_stage
from heterodyne.plan.slices import slices

__all__ = ["require_valid", "violations"]


def violations(plan: Plan, graph: ModelGraph, cluster: Cluster) -> tuple[str, ...]:
    """Every rule that the plan breaks for this model and this cluster, as sentences that say what to do; none if it is valid."""
    return (
        *_of_identity(plan, graph, cluster),
        *_of_devices(plan, cluster),
        *_of_shares(plan, graph),
        *(_of_stages(plan, graph) if graph.opaque is None else _of_module(plan, graph)),
        *_of_coupled(plan, graph),
    )


def require_valid(plan: Plan, graph: ModelGraph, cluster: Cluster) -> None:
    """Raises PlanError that lists every violation."""
    broken = violations(plan, graph, cluster)
    if broken:
        raise PlanError("the plan cannot run:\n  - " + "\n  - ".join(broken))


def _of_identity(plan: Plan, graph: ModelGraph, cluster: Cluster) -> list[str]:
    broken = []
    if plan.model != graph.fingerprint:
        broken.append(
            f"it was made for another model ({plan.model}, this one is {graph.fingerprint}): plan again for this model"
        )
    if plan.cluster != cluster.fingerprint:
        broken.append(
            f"it was made for another cluster ({plan.cluster}, this one is {cluster.fingerprint}): plan again on this cluster"
        )
    return broken


def _of_devices(plan: Plan, cluster: Cluster) -> list[str]:
    known = {device.id for device in cluster.devices}
    placed = [device for pipeline in plan.pipelines for devices in pipeline.places for device in devices]
    used = Counter([*placed, *plan.idle])
    broken = [
        f"device {name!r} is not in the cluster; it has {', '.join(sorted(known))}"
        for name in used
        if name not in known
    ]
    broken += [
        f"device {name!r} is used {count} times; a device has one place" for name, count in used.items() if count > 1
    ]
    missing = [name for name in sorted(known) if name not in used]
    if missing:
        broken.append(f"devices without a place: {', '.join(missing)}; add them to a pipeline or to 'idle'")
    return broken


def _of_shares(plan: Plan, graph: ModelGraph) -> list[str]:
    broken = []
    if not plan.pipelines:
        broken.append("it has no pipeline; at least one must take the batch")
    total = sum(pipeline.micro_batches.samples for pipeline in plan.pipelines)
    if total != plan.global_batch_size:
        shares = " + ".join(str(pipeline.micro_batches.samples) for pipeline in plan.pipelines)
        broken.append(
            f"the shares of the pipelines add up to {total} samples ({shares}), the global batch has {plan.global_batch_size}: "
            "change micro_batches so that they agree"
        )
    counts = {len(pipeline.micro_batches) for pipeline in plan.pipelines if pipeline.micro_batches.samples}
    if graph.batch_statistics and len(counts) > 1:
        # The statistics are those of one micro-batch over all replicas, so each replica must have its part of each.
        broken.append(
            f"{_mixer(graph)} mixes the samples of a micro-batch, so every pipeline needs the same number of micro-batches "
            f"(they have {', '.join(map(str, sorted(counts)))})"
        )
    return broken


def _of_stages(plan: Plan, graph: ModelGraph) -> list[str]:
    broken = []
    for number, pipeline in enumerate(plan.pipelines):
        where = f"pipeline {number}"
        broken += [f"{where} {fault}" for fault in _of_cuts(pipeline, graph)]
        try:
            orders_of(plan.schedule, pipeline)
        except PlanError as error:
            broken.append(f"{where}: {error}")
        for index, stage in enumerate(pipeline.stages):
            faults = [*_of_stage(stage, graph), *_of_overlap(pipeline, index, graph)]
            broken += [f"{where}, stage {index} {fault}" for fault in faults or _of_parts(pipeline, index, graph)]
        if graph.module_only and _in_pieces(pipeline):
            broken.append(f"{where} runs pieces of the model, and {graph.only_whole}")
    if graph.batch_statistics and len({_cuts(pipeline) for pipeline in plan.pipelines}) > 1:
        # Replicas meet in each op that takes statistics, and they must come to them in one order.
        broken.append(
            f"{_mixer(graph)} takes statistics over all pipelines, so they must be cut alike, run in the same order "
            "and recompute the same"
        )
    return broken


def _of_coupled(plan: Plan, graph: ModelGraph) -> list[str]:
    """What a loss that compares samples asks of a plan."""
    if graph.loss.reduction != "coupled":
        return []
    output = graph.output and graph.op_by_name.get(graph.output.name)
    why = f"samples see each other in the loss of this model{f' ({output.source})' if output else ''}"
    broken = []
    for number, pipeline in enumerate(plan.pipelines):
        where = f"pipeline {number}"
        if len(pipeline.stages) > 1 or any(stage.sharded or stage.recompute for stage in pipeline.stages):
            broken.append(f"{where} cuts the model or recomputes, and {why}: only data parallelism is exact")
        if len(pipeline.micro_batches) != 1:
            broken.append(
                f"{where} has {len(pipeline.micro_batches)} micro-batches, and {why}: each replica takes all its samples in one"
            )
        elif any(
            not n
            for stage in pipeline.stages
            if _has_shares(stage)
            for _, n in slices(pipeline.micro_batches.samples, stage.shares)
        ):
            broken.append(f"{where} leaves a device without a sample, and {why}: make it idle")
    return broken


def _in_pieces(pipeline: Pipeline) -> bool:
    return len(pipeline.stages) > 1 or any(stage.recompute or stage.sharded for stage in pipeline.stages)


def _of_module(plan: Plan, graph: ModelGraph) -> list[str]:
    """Of a model without a graph every device runs all of it, as it is."""
    whole = [
        [(stage.ops, stage.recompute, stage.sharded, stage.overlap) for stage in pipeline.stages]
        == [((0, len(graph.ops)), (), False, False)]
        for pipeline in plan.pipelines
    ]
    if all(whole):
        return _of_stages(plan, graph)
    return [
        f"pipeline {whole.index(False)} cuts the model, splits it or recomputes parts of it, which takes a graph of it, and there is none: "
        f"{graph.opaque}. Let one stage run all of it, or change this line"
    ]


def _cuts(pipeline: Pipeline) -> tuple[object, ...]:
    return tuple((stage.ops, stage.recompute) for stage in pipeline.stages), pipeline.place_of_stage, pipeline.order


def _of_cuts(pipeline: Pipeline, graph: ModelGraph) -> list[str]:
    """The stages together are the model, once, in order."""
    if not pipeline.stages:
        return ["has no stage; one at least runs the model"]
    broken = []
    reached = 0
    for index, stage in enumerate(pipeline.stages):
        first, stop = stage.ops
        if first != reached or stop <= first:
            broken.append(
                f"stage {index} runs ops {first} to {stop}, the ones before end at {reached}: stages follow each other, and none is empty"
            )
        reached = stop
    for devices in pipeline.places:
        shares = {stage.shares for stage in pipeline.stages if stage.devices == devices and _has_shares(stage)}
        if len(shares) > 1:
            broken.append(
                f"shares the samples of {', '.join(devices)} in different ways on its stages ({', '.join(map(str, sorted(shares)))}): "
                "the stages of one place share them alike"
            )
    if graph.batch_statistics:
        for index, stage in enumerate(pipeline.stages):
            if _has_shares(stage) and any(
                not n for size in pipeline.micro_batches.sizes for _, n in slices(size, stage.shares)
            ):
                broken.append(
                    f"stage {index} leaves a device without a sample of a micro-batch, and {_mixer(graph)} takes statistics "
                    "over all of them: make the micro-batches larger, or take fewer devices"
                )
    if reached != len(graph.ops):
        broken.append(f"ends at op {reached}, the model has {len(graph.ops)}: the last stage runs to its end")
    return broken


def _mixer(graph: ModelGraph) -> str:
    """The first op that takes statistics over samples, with its line."""
    name = graph.batch_statistics[0]
    return f"{name} ({graph.op_by_name[name].source})"


def _has_shares(stage: Stage) -> bool:
    """Whether its shares can be asked for; if not, that is told of the stage itself."""
    return any(
        r.task_graph == "*" and len(r.layout.shares) == len(stage.devices) and sum(r.layout.shares)
        for r in stage.regions
    )


def _of_parts(pipeline: Pipeline, index: int, graph: ModelGraph) -> list[str]:
    """Of a stage that lies in parts on its devices: what somebody has asked to be cut can be cut that wide."""
    stage = pipeline.stages[index]
    try:
        sharding = shard_stage(graph, pipeline, index)
    except PlanError as error:
        return [str(error)]
    if sharding is None:
        return []
    asked = {region.task_graph for region in stage.regions if region.task_graph != "*"}
    wide = len([share for share in stage.shares if share])
    told: dict[str, str] = {}
    for narrow in sharding.narrow:
        op = graph.op_by_name[narrow.op]
        if op.annotation in asked and op.annotation not in told:
            told[str(op.annotation)] = (
                f"splits TaskGraph {op.annotation!r} over {wide} devices, and {op.target} ({op.source or op.name}) can be cut into "
                f"{narrow.units} parts: split it over {narrow.units} devices or fewer, or leave this op out of the TaskGraph"
            )
    return list(told.values())


def _of_overlap(pipeline: Pipeline, index: int, graph: ModelGraph) -> list[str]:
    stage = pipeline.stages[index]
    if not stage.overlap:
        return []
    if not stage.sharded:
        return ["has 'overlap', and exchanges nothing while it computes: it must lie in parts on several devices"]
    if len(pipeline.stages) > 1:
        return ["has 'overlap', which only a pipeline of one stage can have: leave it out, or take one stage"]
    if stage.recompute:
        return ["has 'overlap' and recomputes: leave out one of them"]
    if graph.batch_statistics:
        return [
            f"has 'overlap', and {_mixer(graph)} mixes the samples of a micro-batch, which has no halves then: leave it out"
        ]
    return []


def _of_stage(stage: Stage, graph: ModelGraph) -> list[str]:
    broken = []
    if not stage.devices:
        broken.append("has no device; give it one")
    if len(set(stage.devices)) < len(stage.devices):
        broken.append("names a device twice; a device has one place")
    known = {"*", *(op.annotation for op in graph.ops if op.annotation is not None)}
    names = Counter(region.task_graph for region in stage.regions)
    broken += [
        f"has region {name!r} {count} times; a TaskGraph has one layout" for name, count in names.items() if count > 1
    ]
    if names["*"] == 0:
        broken.append("has no region '*', which holds the ops without annotation; add one")
    for region in stage.regions:
        if region.task_graph not in known:
            broken.append(f"has region {region.task_graph!r}; the model has {', '.join(sorted(known))}")
        if len(region.layout.shares) != len(stage.devices):
            broken.append(f"has region {region.task_graph!r}, which must have one share a device")
        elif sum(region.layout.shares) == 0:
            broken.append(f"has region {region.task_graph!r} with no share; only ratios count, so write 1")
    for index in stage.recompute:
        if not 0 <= index < len(graph.blocks):
            broken.append(f"recomputes block {index}; the model has blocks 0 to {len(graph.blocks) - 1}")
        elif not stage.ops[0] <= graph.blocks[index].start < graph.blocks[index].stop <= stage.ops[1]:
            block = graph.blocks[index]
            broken.append(
                f"recomputes block {index} (ops {block.start} to {block.stop}), which is not whole in the stage"
            )
    if stage.state_shares is not None:
        broken.append("asks for state_shares, which this version does not run; leave them out")
    return broken

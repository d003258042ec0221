"""Whether a plan keeps the rules, before anything starts. All violations are reported, not the first one."""

from __future__ import annotations

from collections import Counter
from itertools import zip_longest
from math import prod

from heterodyne.cluster.spec import Cluster
from heterodyne.errors import PlanError
from heterodyne.graph.cut import crossings, mixing_samples
from heterodyne.graph.ir import ModelGraph
from heterodyne.plan.capabilities import Capabilities, has_shares
from heterodyne.plan.check_state import faults_of_mesh, faults_of_state, faults_of_state_shards
from heterodyne.plan.kept import kept_ops, unknown, why_not_kept
from heterodyne.plan.mesh import count_of
from heterodyne.plan.order import is_asynchronous, orders_of
from heterodyne.plan.plan import Pipeline, Plan, Stage
from heterodyne.plan.precision import precision_of
from heterodyne.plan.schedules.asynchronous import ahead, depth_of
from heterodyne.plan.sharded_stage import shard_stage
from heterodyne.plan.weights import PlannedWeights

__all__ = ["require_valid", "violations"]


def violations(plan: Plan, graph: ModelGraph, cluster: Cluster, able: Capabilities | None = None) -> tuple[str, ...]:
    """Every rule that the plan breaks for this model and this cluster, as sentences that say what to do; none if it is valid.

    ``able``: what runs exactly; None: what does for the model, whatever its optimizer.
    """
    return _checked(plan, graph, cluster, able or Capabilities(graph))[0]


def require_valid(plan: Plan, graph: ModelGraph, cluster: Cluster, able: Capabilities | None = None) -> PlannedWeights:
    """Return who holds which weights under the plan. ``able``: see `violations`. Raises PlanError that lists every violation."""
    broken, weights = _checked(plan, graph, cluster, able or Capabilities(graph))
    if broken or weights is None:
        raise PlanError("the plan cannot run:\n  - " + "\n  - ".join(broken))
    return weights


def _checked(
    plan: Plan, graph: ModelGraph, cluster: Cluster, able: Capabilities
) -> tuple[tuple[str, ...], PlannedWeights | None]:
    """Every violation, and who holds which weights, which can only be said of a plan that keeps all other rules."""
    refused = able.faults(plan)
    broken = (
        *_of_identity(plan, graph, cluster),
        *_of_devices(plan, cluster),
        *_of_shares(plan),
        *faults_of_state(plan),
        *(_of_stages(plan, graph) if graph.opaque is None or not refused else ()),
        *_of_statistics(plan, graph),
        *refused,
    )
    if broken:
        return broken, None
    try:
        weights = PlannedWeights.of(plan, graph, reach=able.reach)
    except PlanError as error:
        return (str(error),), None
    return (*faults_of_state_shards(plan, weights), *_of_asynchronous(plan, cluster, weights)), weights


def _of_asynchronous(plan: Plan, cluster: Cluster, weights: PlannedWeights) -> list[str]:
    """Return the faults of predicted weights beside those of the table: only the rank that alone updates a weight can predict it, without
    a loss scale, in the order of 1F1B."""
    if not is_asynchronous(plan):
        return []
    broken = []
    shared = next((bucket for bucket in weights.buckets if len(bucket.owners) > 1), None)
    if shared is not None:
        broken.append(
            f"it trains with predicted weights ({plan.schedule}), and {shared.parameters[0]!r} is on {' and '.join(shared.owners)}, which "
            "would wait for each other's gradients at different times: give each stage one device and take one pipeline, and put tied "
            "weights into one stage; or take 1F1B"
        )
    narrow = [d for d in plan.devices if precision_of(plan.precision, cluster.device(d).kind) == "fp16"]
    if narrow:
        broken.append(
            f"{narrow[0]} computes in fp16, whose loss scale takes one decision of all devices a step, and {plan.schedule} makes none: "
            "take bf16 or fp32"
        )
    for place, order in enumerate(orders_of(plan.schedule, plan.pipelines[0])):
        count = sum(action.kind == "F" for action in order)
        if order and order != ahead(order[0].stage, depth_of(order), count):
            broken.append(
                f"place {place} has an order that {plan.schedule} cannot repeat from batch to batch: write some forwards, then one forward "
                "and one backward in turn, as 1F1B has them, or leave 'order' out"
            )
    return broken


def _of_identity(plan: Plan, graph: ModelGraph, cluster: Cluster) -> list[str]:
    broken = []
    if not plan.model or not plan.cluster:
        broken.append(
            f"it names devices, but not the model ({graph.fingerprint}) and the cluster ({cluster.fingerprint}) that it is for: write "
            "them as 'model' and 'cluster', or blocks and groups of a kind in place of ops and devices"
        )
        return broken
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


def _of_shares(plan: Plan) -> list[str]:
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
    return broken


def _of_stages(plan: Plan, graph: ModelGraph) -> list[str]:
    broken = []
    for number, pipeline in enumerate(plan.pipelines):
        where = f"pipeline {number}"
        cuts = _of_cuts(pipeline, graph)
        broken += [f"{where} {fault}" for fault in cuts or _of_borders(pipeline, graph)]
        try:
            orders_of(plan.schedule, pipeline)
        except PlanError as error:
            broken.append(f"{where}: {error}")
        for index, stage in enumerate(pipeline.stages):
            faults = _of_stage(stage, graph)
            # Shards are only worked out for stages that together are the model.
            parts = [] if faults or cuts else _of_parts(pipeline, index, graph)
            broken += [f"{where}, stage {index} {fault}" for fault in (*faults, *parts)]
    return broken


def _of_statistics(plan: Plan, graph: ModelGraph) -> list[str]:
    """BatchNorm has at least two values of each channel in what all replicas run together: one has no variance."""
    together = [sum(sizes) for sizes in zip_longest(*(p.micro_batches.sizes for p in plan.pipelines), fillvalue=0)]
    least = min((size for size in together if size), default=0)
    for op in (graph.op_by_name[name] for name in graph.batch_statistics if graph.opaque is None):
        samples, _, *places = op.outputs[0].shape  # [N, C, ...]
        if least and samples(least) * prod(place(least) for place in places) < 2:
            number = together.index(least)
            return [
                f"its replicas together run {least} sample in micro-batch {number}, and {op.target} ({op.source or op.name}) takes "
                "statistics over samples, of which it needs 2 at least: make the micro-batches larger, or fewer"
            ]
    return []


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
        shares = {
            tuple(axis.shares for axis in stage.layout.axes)
            for stage in pipeline.stages
            if stage.devices == devices and has_shares(stage)
        }
        if len(shares) > 1:
            ways = (" x ".join(map(str, axes)) for axes in sorted(shares))
            broken.append(
                f"shares the samples of {', '.join(devices)} in different ways on its stages ({', '.join(ways)}): "
                "the stages of one place share them alike"
            )
    whole, last = graph.together_from, pipeline.stages[-1].ops[0]
    if whole is not None and whole < last:
        op = graph.ops[whole]
        broken.append(
            f"cuts at op {last}, and from op {whole} on ({op.source or op.name}) the loss compares the samples of the whole batch: begin "
            "the last stage there or before"
        )
    if reached != len(graph.ops):
        broken.append(f"ends at op {reached}, the model has {len(graph.ops)}: the last stage runs to its end")
    return broken


def _of_borders(pipeline: Pipeline, graph: ModelGraph) -> list[str]:
    """Return the faults of what crosses between places of which one has several devices: its samples must be in order in a dim."""
    if all(len(devices) == 1 for devices in pipeline.places):
        return []
    home, stages = pipeline.place_of_stage, pipeline.stages
    mixed = mixing_samples(graph)
    broken = []
    for crossing in crossings(graph, [stage.ops[0] for stage in stages]):
        op = graph.op_by_name[crossing.name]
        for reader in crossing.consumers if op.name in mixed else ():
            devices = len(stages[crossing.producer].devices) + len(stages[reader].devices)
            if home[crossing.producer] != home[reader] and devices > 2:
                broken.append(
                    f"sends {op.name} ({op.source or op.target}) from stage {crossing.producer} to stage {reader}, and samples cannot be "
                    "cut out of it: give both stages one device each, or cut elsewhere"
                )
    return broken


def _of_parts(pipeline: Pipeline, index: int, graph: ModelGraph) -> list[str]:
    """Return the faults of a sharded stage, of which parts that were asked for cannot be cut that wide."""
    stage = pipeline.stages[index]
    try:
        sharding = shard_stage(graph, pipeline, index)
    except PlanError as error:
        return [str(error)]
    if sharding is None:
        return []
    asked = {region.task_graph for region in stage.regions if region.task_graph != "*"}
    told: dict[str, str] = {}
    for axis, narrow in [(along, each) for along in sharding.axes for each in along.narrow]:
        op, wide = graph.op_by_name[narrow.op], sum(share > 0 for share in axis.shares[0])
        if op.annotation in asked and op.annotation not in told:
            told[str(op.annotation)] = (
                f"splits TaskGraph {op.annotation!r} over {wide} devices, and {op.target} ({op.source or op.name}) can be cut into "
                f"{narrow.units} parts: split it over {narrow.units} devices or fewer, or leave this op out of the TaskGraph"
            )
    return list(told.values())


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
        layout = region.layout
        if count_of(layout.axes) != len(stage.devices):
            sizes = " x ".join(map(str, layout.sizes))
            told = f": {sizes} members are not {len(stage.devices)} devices" if layout.inner else ""
            broken.append(f"has region {region.task_graph!r}, which must have one share a device{told}")
        elif not all(sum(axis.shares) for axis in layout.axes):
            broken.append(f"has region {region.task_graph!r} with no share; only ratios count, so write 1")
    if stage.overlap and not stage.sharded:
        broken.append("has 'overlap', and exchanges nothing while it computes: it must be sharded over several devices")
    if stage.hierarchical and not stage.sharded:
        broken.append("has 'hierarchical', and no tokens go to other devices: it must be sharded over several devices")
    again = _of_recompute(stage, graph)
    return [*broken, *faults_of_mesh(stage), *again, *([] if again else _of_keep(stage, graph))]


def _of_recompute(stage: Stage, graph: ModelGraph) -> list[str]:
    named = [("recomputes", index) for index in stage.recompute]
    named += [("offloads activations of", index) for index in stage.offload_activations]
    broken = [
        f"{does} block {index} more than once: write each block once"
        for (does, index), n in Counter(named).items()
        if n > 1
    ]
    for does, index in named:
        if not 0 <= index < len(graph.blocks):
            broken.append(f"{does} block {index}; the model has blocks 0 to {len(graph.blocks) - 1}")
        elif not stage.ops[0] <= graph.blocks[index].start < graph.blocks[index].stop <= stage.ops[1]:
            block = graph.blocks[index]
            broken.append(f"{does} block {index} (ops {block.start} to {block.stop}), which is not whole in the stage")
    if stage.reload_ahead is not None and not stage.offload_activations:
        broken.append(
            "has 'reload_ahead', and nothing of it waits on the host: leave it out, or name blocks in 'offload_activations'"
        )
    both = sorted(set(stage.recompute).intersection(stage.offload_activations))
    if both:
        shown = ", ".join(map(str, both))
        broken.append(f"recomputes blocks {shown} and offloads their activations: name each block in one of the two")
    return broken


def _of_keep(stage: Stage, graph: ModelGraph) -> list[str]:
    """Return what is kept of blocks that are computed again."""
    if stage.keep and not stage.recompute:
        return ["has 'keep', and recomputes nothing: everything is kept; leave it out, or name blocks in 'recompute'"]
    blocks = [graph.blocks[index] for index in stage.recompute]
    broken = [
        f"keeps {name!r}, and no op of the blocks that it recomputes is called so; write a kind of op, as 'linear', or module and kind, "
        "as 'mlp.fc1.linear'"
        for name in unknown(graph, blocks, stage.keep)
    ]
    told: set[str] = set()
    for block in blocks:
        for op in kept_ops(graph, block, stage.keep):
            why = why_not_kept(graph, op)
            if why is not None and op.kind not in told:
                told.add(op.kind)
                broken.append(
                    f"keeps {op.kind} ({op.source or op.name}), which {why}: leave it out of 'keep', or name others of that kind by module"
                )
    return broken

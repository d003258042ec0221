"""Whether a plan keeps the rules, before anything starts. All violations are told, not the first one."""

from __future__ import annotations

from collections import Counter
from typing import Final

from heterodyne.cluster.spec import Cluster
from heterodyne.errors import PlanError
from heterodyne.graph.ir import ModelGraph
from heterodyne.plan.plan import Plan, Stage

__all__ = ["require_valid", "violations"]

_SCHEDULES: Final = ("1F1B",)


def violations(plan: Plan, graph: ModelGraph, cluster: Cluster) -> tuple[str, ...]:
    """Every rule that the plan breaks for this model and this cluster, as sentences that say what to do; none if it is valid."""
    return (
        *_of_identity(plan, graph, cluster),
        *_of_devices(plan, cluster),
        *_of_shares(plan, graph),
        *_of_stages(plan, graph),
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
    used = Counter([*plan.devices, *plan.idle])
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
            f"{graph.batch_statistics[0]} mixes the samples of a micro-batch, so every pipeline needs the same number of micro-batches "
            f"(they have {', '.join(map(str, sorted(counts)))})"
        )
    return broken


def _of_stages(plan: Plan, graph: ModelGraph) -> list[str]:
    broken = []
    if plan.schedule not in _SCHEDULES:
        broken.append(f"schedule {plan.schedule!r} is not known; it can be {', '.join(_SCHEDULES)}")
    for number, pipeline in enumerate(plan.pipelines):
        where = f"pipeline {number}"
        if len(pipeline.stages) != 1:
            broken.append(
                f"{where} has {len(pipeline.stages)} stages; this version runs plans with one stage a pipeline"
            )
        for stage in pipeline.stages:
            broken += [f"{where} {fault}" for fault in _of_stage(stage, graph)]
    return broken


def _of_stage(stage: Stage, graph: ModelGraph) -> list[str]:
    broken = []
    if stage.ops != (0, len(graph.ops)):
        broken.append(
            f"runs ops {stage.ops[0]} to {stage.ops[1]}, the model has 0 to {len(graph.ops)}: one stage runs them all"
        )
    if len(stage.devices) != 1:
        broken.append(f"has {len(stage.devices)} devices in a stage; this version runs one device a stage")
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
        if region.layout.kind != "replicate" or len(region.layout.shares) != len(stage.devices):
            broken.append(f"has region {region.task_graph!r}, which must be 'replicate' with one share a device")
        elif sum(region.layout.shares) == 0:
            broken.append(f"has region {region.task_graph!r} with no share; only ratios count, so write 1")
    if stage.recompute or stage.state_shares is not None:
        broken.append("asks for recompute or state_shares, which this version does not run; leave them out")
    return broken

"""A plan that names kinds of devices and blocks becomes one that names each device and its ops: the same plan, ready to run.

A plan for 25,000 devices is a screenful, since alike pipelines are written once and stages ask for so many devices of a kind. Binding
repeats the pipelines and hands out devices node by node, so that a stage stays in one node or takes whole ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby

from heterodyne.cluster.spec import Cluster
from heterodyne.errors import PlanError
from heterodyne.graph.ir import ModelGraph
from heterodyne.plan.plan import Group, Pipeline, Plan, Stage

__all__ = ["bind"]

_Homes = list[tuple[str, ...]]
"""The devices of each stage of a pipeline."""


def bind(plan: Plan, graph: ModelGraph, cluster: Cluster) -> Plan:
    """The plan on the devices of a cluster; a plan that is bound already is returned as it is.

    Raises PlanError if the cluster has too few devices of a kind, or the model has other blocks than the plan.
    """
    if plan.bound:
        return plan
    _require_blocks(plan, graph)
    if (most := max((pipeline.replicas for pipeline in plan.pipelines), default=0)) > len(cluster.devices):
        raise PlanError(
            f"the plan has {most:,} replicas of a pipeline, and the cluster {len(cluster.devices):,} devices: plan again for this cluster"
        )
    free = _Free(plan, cluster)
    pipelines: list[Pipeline] = []
    for _, alike in groupby(plan.pipelines, key=lambda pipeline: (pipeline.stages, pipeline.order)):
        every = [pipeline for pipeline in alike for _ in range(pipeline.replicas)]
        homes = _homes(every, free, plan.placement)
        pipelines += [_bound(pipeline, own, graph) for pipeline, own in zip(every, homes, strict=True)]
    used = {device for pipeline in pipelines for stage in pipeline.stages for device in stage.devices}
    return plan.model_copy(
        update={
            "model": graph.fingerprint,
            "cluster": cluster.fingerprint,
            "pipelines": tuple(pipelines),
            "idle": tuple(device.id for device in cluster.devices if device.id not in used),
        }
    )


def _require_blocks(plan: Plan, graph: ModelGraph) -> None:
    ends = {stage.blocks[1] for pipeline in plan.pipelines for stage in pipeline.stages[-1:] if stage.blocks}
    if ends and ends != {len(graph.blocks)}:
        raise PlanError(
            f"the plan is for {' or '.join(map(str, sorted(ends)))} blocks, and model {graph.name} has {len(graph.blocks)}: plan again for "
            "this model"
        )


def _bound(pipeline: Pipeline, homes: _Homes, graph: ModelGraph) -> Pipeline:
    stages = tuple(
        stage.model_copy(update={"ops": _ops(stage, graph), "devices": devices, "blocks": None, "group": None})
        for stage, devices in zip(pipeline.stages, homes, strict=True)
    )
    return pipeline.model_copy(update={"stages": stages, "replicas": 1})


def _ops(stage: Stage, graph: ModelGraph) -> tuple[int, int]:
    if stage.blocks is None:
        return stage.ops
    start, stop = stage.blocks
    if not start < stop <= len(graph.blocks):
        raise PlanError(f"a stage runs blocks {start} to {stop}; the model has blocks 0 to {len(graph.blocks) - 1}")
    return graph.blocks[start].start, graph.blocks[stop - 1].stop


def _homes(pipelines: Sequence[Pipeline], free: _Free, placement: str) -> list[_Homes]:
    """The devices of each stage of alike pipelines: replicas of a stage beside each other, or the stages of a pipeline."""
    stages = pipelines[0].stages
    homes: list[_Homes] = [[()] * len(stages) for _ in pipelines]
    replicas, numbers = range(len(pipelines)), range(len(stages))
    order: Iterator[tuple[int, int]] = (
        ((replica, number) for replica in replicas for number in numbers)
        if placement == "pipelines"
        else ((replica, number) for number in numbers for replica in replicas)
    )
    places: dict[tuple[int, int], tuple[Group, tuple[str, ...]]] = {}
    for replica, number in order:
        stage = stages[number]
        if stage.group is None:
            homes[replica][number] = stage.devices
            continue
        place = stage.group.place
        if place is None:
            homes[replica][number] = free.take(stage.group)
            continue
        group, taken = places.get((replica, place)) or (stage.group, free.take(stage.group))
        if _devices_of(group) != _devices_of(stage.group):
            raise PlanError(
                f"stages of place {place} ask for {_devices_of(group)} and for {_devices_of(stage.group)}; they run on the same devices: "
                "write the same group, or another place"
            )
        homes[replica][number] = taken
        places[replica, place] = group, taken
    return homes


def _devices_of(group: Group) -> str:
    return f"{group.devices} x {group.kind}{f' of {group.node}' if group.node else ''}"


@dataclass
class _Node:
    """``left``: devices of one kind that no stage has yet; ``size``: how many there were."""

    name: str
    left: list[str] = field(default_factory=list)
    size: int = 0


class _Free:
    """Devices that no stage has yet, node by node."""

    def __init__(self, plan: Plan, cluster: Cluster) -> None:
        named = {device for p in plan.pipelines for stage in p.stages for device in stage.devices}
        self._nodes: dict[str, dict[str, _Node]] = {}
        for device in cluster.devices:
            if device.id not in named:
                node = self._nodes.setdefault(device.kind, {}).setdefault(device.node, _Node(device.node))
                node.left.append(device.id)
                node.size += 1

    def take(self, group: Group) -> tuple[str, ...]:
        """Take devices of the first node that has as many left, or the first whole nodes that have as many together. Raises PlanError."""
        nodes = self._of(group)
        whole: list[_Node] = []
        for node in nodes:
            if len(node.left) >= group.devices:
                taken, node.left = node.left[: group.devices], node.left[group.devices :]
                return tuple(taken)
            if len(node.left) == node.size and sum(own.size for own in whole) + node.size <= group.devices:
                whole.append(node)
            if sum(own.size for own in whole) == group.devices:
                together = tuple(device for own in whole for device in own.left)
                for own in whole:
                    own.left = []
                return together
        kind = f"{group.kind}{f' of {group.node}' if group.node else ''}"
        left = [len(node.left) for node in nodes if node.left]
        raise PlanError(
            f"a stage asks for {group.devices} devices of kind {kind} in one node, or for whole nodes of them; "
            + (f"the nodes have {', '.join(map(str, left))} left" if left else self._none_left(group))
            + ": plan again for this cluster"
        )

    def _none_left(self, group: Group) -> str:
        kinds = sorted(self._nodes)
        return "none is left" if group.kind in kinds else f"the cluster has {', '.join(kinds)}"

    def _of(self, group: Group) -> list[_Node]:
        nodes = list(self._nodes.get(group.kind, {}).values())
        return [node for node in nodes if group.node in (node.name, node.name.rpartition("-")[0])] or nodes

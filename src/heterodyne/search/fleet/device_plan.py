"""A plan over a fleet as one that runs: every pipeline, every device by its id."""

from __future__ import annotations

from collections.abc import Iterator

from heterodyne.cluster.fleet import Fleet
from heterodyne.cluster.fleet_cluster import cluster_of
from heterodyne.cluster.spec import Cluster
from heterodyne.errors import PlanError
from heterodyne.graph.ir import ModelGraph
from heterodyne.plan.mesh import Kind
from heterodyne.plan.micro_batches import MicroBatches
from heterodyne.plan.plan import Axis, Layout, Pipeline, Plan, Region, Stage
from heterodyne.search.fleet.plan import FleetPlan
from heterodyne.search.fleet.plan import Stage as FleetStage

__all__ = ["device_plan"]


class _Free:
    """Devices that no stage has yet, node by node."""

    def __init__(self, fleet: Fleet, cluster: Cluster) -> None:
        self._nodes: dict[str, list[list[str]]] = {}
        for pool in fleet.pools:
            of_node: dict[str, list[str]] = {name: [] for name in pool.node_names}
            for device in cluster.devices:
                if device.node in of_node and device.kind == pool.kind:
                    of_node[device.node].append(device.id)
            self._nodes[pool.name] = list(of_node.values())
        self._full = {pool.name: pool.devices_per_node for pool in fleet.pools}

    def take(self, pool: str, width: int) -> tuple[str, ...]:
        """Of one node, or whole nodes. Raises PlanError if there are not so many left."""
        whole: list[list[str]] = []
        for node in self._nodes[pool]:
            if len(node) < width and len(node) == self._full[pool]:
                whole.append(node)
                if sum(map(len, whole)) == width:
                    taken = tuple(device for own in whole for device in own)
                    for own in whole:
                        own.clear()
                    return taken
            if len(node) >= width:
                taken, node[:width] = tuple(node[:width]), []
                return taken
        raise PlanError(f"no node of {pool} has {width} devices left for a stage of that width")


def device_plan(plan: FleetPlan, fleet: Fleet, graph: ModelGraph) -> Plan:
    """The same plan for each device of the fleet; its layers are the blocks of the graph.

    Raises ClusterError for a fleet that is too large to be listed; PlanError if the graph has other layers than the plan, or the plan
    shares state out: the runtime keeps all of it whole on every replica, which may not fit.
    """
    if plan.zero:
        raise PlanError(
            f"the plan shares state out over replicas (ZeRO-{plan.zero}), and the runtime keeps it whole on each: plan with level 0"
        )
    layers = max(stage.stop for group in plan.groups for stage in group.template.stages)
    if layers != len(graph.blocks):
        raise PlanError(f"the plan is for {layers} layers, and model {graph.name} has {len(graph.blocks)} blocks")
    cluster = cluster_of(fleet)
    free = _Free(fleet, cluster)
    homes = _homes(plan, free)
    batches = _batches(plan)
    pipelines, number = [], 0
    for group in plan.groups:
        for _ in range(group.replicas):
            # Stages on the same devices share a place.
            stages = tuple(
                _stage(stage, homes[number][index % group.template.places], graph)
                for index, stage in enumerate(group.template.stages)
            )
            pipelines.append(Pipeline(micro_batches=MicroBatches(batches[number]), stages=stages))
            number += 1
    used = {device for of_pipeline in homes for devices in of_pipeline for device in devices}
    return Plan(
        model=graph.fingerprint,
        cluster=cluster.fingerprint,
        global_batch_size=plan.global_batch,
        schedule=plan.schedule,
        pipelines=tuple(pipelines),
        idle=tuple(device.id for device in cluster.devices if device.id not in used),
    )


def _stage(stage: FleetStage, devices: tuple[str, ...], graph: ModelGraph) -> Stage:
    blocks = graph.blocks[stage.start : stage.stop]
    # What exchanges most is innermost, among the devices that are nearest to each other.
    ways: tuple[tuple[Kind, int], ...] = (("replicate", stage.data), ("context", stage.context), ("split", stage.width))
    axes = [Axis(kind=kind, shares=(1,) * width) for kind, width in ways if width > 1] or [Axis(shares=(1,))]
    layout = Layout(kind=axes[0].kind, shares=axes[0].shares, inner=tuple(axes[1:]))
    return Stage(
        ops=(blocks[0].start, blocks[-1].stop),
        devices=devices,
        regions=(Region(layout=layout),),
        recompute=tuple(range(stage.start, stage.stop)) if stage.recompute else (),
    )


def _batches(plan: FleetPlan) -> list[tuple[int, ...]]:
    """Sizes of the micro-batches of each pipeline. What the groups could hold beyond the global batch is missing from the last ones."""
    found = [
        [group.template.micro_batch] * group.num_microbatches for group in plan.groups for _ in range(group.replicas)
    ]
    over = sum(map(sum, found)) - plan.global_batch
    for sizes in reversed(found):
        while over and sizes:
            less = min(over, sizes[-1])
            over -= less
            sizes[-1] -= less
            if not sizes[-1]:
                sizes.pop()
    return [tuple(sizes) for sizes in found]


def _homes(plan: FleetPlan, free: _Free) -> list[list[tuple[str, ...]]]:
    """The devices of each place of each pipeline: replicas of a place beside each other, or the places of a pipeline."""
    homes: list[list[tuple[str, ...]]] = []
    for group in plan.groups:
        places = group.template.homes
        own: list[list[tuple[str, ...]]] = [[()] * len(places) for _ in range(group.replicas)]
        order: Iterator[tuple[int, int]] = (
            ((replica, number) for replica in range(group.replicas) for number in range(len(places)))
            if plan.layout == "pipelines"
            else ((replica, number) for number in range(len(places)) for replica in range(group.replicas))
        )
        for replica, number in order:
            own[replica][number] = free.take(places[number].pool, places[number].devices)
        homes += own
    return homes

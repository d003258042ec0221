"""A profile of devices that nobody has measured: what measuring would find, as far as datasheets tell.

With it the search over devices (`search.planner`) plans on paper as it does on devices that are here: unequal shards of state, state and
activations on hosts, blocks that keep some of their ops. Rates of links are what rings reach of what is promised, see `reached_between`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from heterodyne.cluster.fleet import Fleet
from heterodyne.cluster.fleet_cluster import cluster_of
from heterodyne.cluster.profile import BlockSample, DeviceProfile, Profile
from heterodyne.cluster.spec import Cluster, Link
from heterodyne.cost.graph_layers import GraphLayers
from heterodyne.cost.layers import Widths
from heterodyne.cost.recipe import Recipe
from heterodyne.graph.ir import Block, ModelGraph
from heterodyne.plan.precision import precision_of
from heterodyne.predictor.constants import constants
from heterodyne.predictor.datasheet_times import DatasheetTimes, datasheet_times
from heterodyne.predictor.devices import networks_of, reached_between
from heterodyne.predictor.software import Software
from heterodyne.predictor.usable import context_bytes

__all__ = ["believed_cluster", "datasheet_profile"]


def datasheet_profile(
    graph: ModelGraph, fleet: Fleet, *, sizes: Sequence[int], recipe: Recipe, software: Software | None = None
) -> Profile:
    """Of every device of the fleet, for micro-batches of these sizes.

    Raises ClusterError for a kind whose datasheet lacks a number that is needed.
    """
    times = datasheet_times(graph, fleet, recipe=recipe, software=software)
    backends = {pool.kind: pool.backend for pool in fleet.pools}
    of_kind = {kind: _of_kind(times, kind, sizes, backends[kind]) for kind in fleet.kinds}
    devices = {device.id: of_kind[device.kind] for device in cluster_of(fleet).devices}
    return Profile(key="datasheets", devices=devices, kinds=graph.kind_names)


def believed_cluster(fleet: Fleet) -> Cluster:
    """The devices of a fleet, joined by what collectives reach of its links.

    Raises ClusterError for a kind whose datasheet lacks a number that is needed.
    """
    networks, cluster = networks_of(fleet), cluster_of(fleet)
    of_node = {device.node: networks[device.kind] for device in cluster.devices}
    inside = [
        Link(between=(node, node), bandwidth_bytes_per_s=own.inside_bytes_per_s, latency_s=own.inside_latency_s)
        for node, own in of_node.items()
    ]
    between = [_reached(link) for link in cluster.links if link.between[0] != link.between[1]]
    return Cluster(name=cluster.name, devices=cluster.devices, links=(*inside, *between), hosts=cluster.hosts)


def _reached(link: Link) -> Link:
    bandwidth, latency_s = reached_between(link.bandwidth_bytes_per_s, link.latency_s)
    return replace(link, bandwidth_bytes_per_s=bandwidth, latency_s=latency_s)


def _of_kind(times: DatasheetTimes, kind: str, sizes: Sequence[int], backend: str) -> DeviceProfile:
    stated, memory = constants().stated, times.chips[kind].memory_bytes_per_s
    copy_s = 1 / (stated.pcie_gb_per_s * 1e9)
    passes, layers, blocks = times.recipe.update_passes, GraphLayers(times), times.graph.kinds
    samples = {name: tuple(_sample(layers, kind, block, size) for size in sizes) for name, block in blocks.items()}
    return DeviceProfile(
        blocks=samples,
        optimizer_s_per_byte=passes / memory,
        # Gradients go to the host and weights come back.
        host_update_s_per_byte=2 * copy_s + passes / (stated.host_memory_gb_per_s * 1e9),
        host_copy_s_per_byte=copy_s,
        context_bytes=context_bytes(backend),
        precision=precision_of(times.recipe.precision, kind),
    )


def _sample(layers: GraphLayers, kind: str, block: Block, size: int) -> BlockSample:
    cost, times = layers.cost(kind, block.kind, Widths(), size), layers.times
    assert cost is not None  # one device, a kind of block that there is
    narrow = precision_of(times.recipe.precision, kind) != "fp32"
    copied = sum(2 * parameter.numel for parameter in times.graph.parameters_of(block)) if narrow else 0
    return BlockSample(
        micro_batch_size=size,
        forward_s=cost.forward_s,
        backward_s=cost.backward_s,
        spread=0.0,
        saved_bytes=cost.kept_bytes,
        copied_bytes=copied,
        # The gradients of inputs and those of weights are as many products.
        input_s=cost.backward_s / 2,
        weight_s=cost.backward_s / 2,
    )

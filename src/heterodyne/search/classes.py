"""Classes of devices: those that measure alike are counted together, so that the search over classes plans the devices that are here.

Four unlike CPUs are four classes of one; eight equal cards are one class of eight.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import combinations_with_replacement

from heterodyne.cluster.spec import Cluster, Device, Link
from heterodyne.cost.model import CostModel
from heterodyne.errors import MeasureError

__all__ = ["ALIKE", "class_cluster", "class_names", "first_of", "interchangeable"]

ALIKE = 0.05
"""Devices of a kind whose seconds differ by no more than this part are one class: measurements are not known better."""


def class_names(model: CostModel) -> dict[str, str]:
    """For each device the name of its class: its kind, with a number where devices of the kind are unlike."""
    leaders: list[Device] = []
    of: dict[str, Device] = {}
    for device in model.cluster.devices:
        leader = next((other for other in leaders if _alike(device, other, model)), None)
        if leader is None:
            leaders.append(device)
        of[device.id] = leader or device
    several = Counter(leader.kind for leader in leaders)
    numbers: Counter[str] = Counter()
    named = {}
    for leader in leaders:
        numbers[leader.kind] += 1
        number = f"#{numbers[leader.kind]}" if several[leader.kind] > 1 else ""
        named[leader.id] = f"{leader.kind}{number}"
    return {device: named[leader.id] for device, leader in of.items()}


def interchangeable(model: CostModel) -> dict[str, int]:
    """For each device a number, the same for those of one class in one node."""
    classes = class_names(model)
    numbers: dict[tuple[str, str], int] = {}
    return {
        device.id: numbers.setdefault((classes[device.id], device.node), len(numbers))
        for device in model.cluster.devices
    }


def first_of(kinds: Mapping[str, int]) -> dict[str, str]:
    """For each device the first that is interchangeable with it."""
    first: dict[int, str] = {}
    return {device: first.setdefault(kind, device) for device, kind in kinds.items()}


def class_cluster(model: CostModel, names: dict[str, str]) -> Cluster:
    """The cluster with classes for kinds, and links as fast as they were measured."""
    devices = tuple(replace(device, kind=names[device.id]) for device in model.cluster.devices)
    return Cluster(name=model.cluster.name, devices=devices, links=tuple(_links(model)))


def _alike(one: Device, other: Device, model: CostModel) -> bool:
    if (one.kind, one.memory_bytes, one.backend) != (other.kind, other.memory_bytes, other.backend):
        return False
    ours, theirs = model.compute[one.id], model.compute[other.id]
    sizes = set(map(int, ours.forward.total.sizes)) & set(map(int, theirs.forward.total.sizes))
    pairs = [(ours.micro_batch_s(size), theirs.micro_batch_s(size)) for size in sizes]
    return bool(pairs) and all(abs(a - b) <= ALIKE * max(a, b) for a, b in pairs)


def _links(model: CostModel) -> Iterator[Link]:
    """Between nodes and inside of them, of the slowest pair of devices."""
    nodes: dict[str, list[str]] = {}
    for device in model.cluster.devices:
        nodes.setdefault(device.node, []).append(device.id)
    for a, b in combinations_with_replacement(nodes, 2):
        pairs = [(x, y) for x in nodes[a] for y in nodes[b] if x != y]
        try:
            sent = [model.collectives.send(x, y) for x, y in pairs]
        except MeasureError:
            continue  # nothing is known of how they are joined
        if sent:
            yield Link(
                between=(a, b),
                bandwidth_bytes_per_s=1 / max(1e-15, *(link.s_per_byte for link in sent)),
                latency_s=max(link.latency_s for link in sent),
            )

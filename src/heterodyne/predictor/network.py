"""Seconds of collectives over nodes of several devices: rings inside nodes, rings between them, and what both take together.

Costs are alpha-beta: a ring of n passes 2 (n - 1) messages of 1/n of the bytes (Patarasuk & Yuan, 2009), half of them for a gather or a
scatter. Groups that run at the same time share what their node has towards the others.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

__all__ = ["Group", "Network"]


@dataclass(frozen=True, kw_only=True)
class Group:
    """Devices that communicate: ``size`` of them, ``inside`` in each node, beside ``others`` other groups of the node at the same time."""

    size: int
    inside: int
    others: int = 0

    @property
    def nodes(self) -> int:
        return max(1, self.size // self.inside)


@dataclass(frozen=True, kw_only=True)
class Network:
    """Alike nodes.

    Args:
        devices: of a node.
        inside_bytes_per_s: of a device towards the others of its node, in one direction.
        between_bytes_per_s: of a node towards the others, in one direction.
        inside_latency_s, between_latency_s: of one message.
        reached: where links of a device go to single others of its node, not to a switch: the part of them that a group of 1, 2, ...
            members has among itself. Empty: all of them, always.
    """

    devices: int
    inside_bytes_per_s: float
    between_bytes_per_s: float
    inside_latency_s: float = 8e-6
    between_latency_s: float = 20e-6
    reached: tuple[float, ...] = ()

    def group(self, size: int, stride: int = 1) -> Group:
        """``size`` devices, each ``stride`` ranks behind the one before."""
        inside = max(1, min(size, self.devices // stride))
        return Group(size=size, inside=inside, others=max(0, min(stride, self.devices) - 1))

    def all_reduce_s(self, group: Group, count: float) -> float:
        """Of ``count`` bytes on each device. Libraries reduce along a tree where a ring is long."""
        if group.size < 2 or count <= 0:
            return 0.0
        return 2 * (self._carried_s(group, count) + min(self._ring_s(group), self._tree_s(group)))

    def gather_s(self, group: Group, count: float) -> float:
        """All-gather to (or reduce-scatter from) ``count`` bytes on each device."""
        if group.size < 2 or count <= 0:
            return 0.0
        return self._carried_s(group, count) + self._ring_s(group)

    def all_to_all_s(self, group: Group, count: float, copies: int = 1) -> float:
        """Of ``count`` bytes that each device has for all of the group, each byte for ``copies`` members by chance, who may be on one node:
        it enters a node once, and is handed on there.
        """
        if group.size < 2 or count <= 0:
            return 0.0
        outside = count * _met(group.nodes, copies) * (1 - 1 / group.nodes)
        inside = count * _met(group.size, copies) * (group.inside - 1) / (group.inside if copies > 1 else group.size)
        between = outside * group.inside * (group.others + 1) / self.between_bytes_per_s
        return (
            max(between, inside / self._inside_bytes_per_s(group))
            + self.between_latency_s * (group.nodes > 1)
            + self.inside_latency_s
        )

    def _carried_s(self, group: Group, count: float) -> float:
        """A ring, once round. It is laid out so that every byte enters a node once, over whatever its members have together."""
        part = (group.size - 1) / group.size * count
        inside = part / self._inside_bytes_per_s(group) if group.inside > 1 else 0.0
        if group.nodes == 1:
            return inside
        return max(inside, part * (group.others + 1) / self.between_bytes_per_s)

    def _inside_bytes_per_s(self, group: Group) -> float:
        """Of a member towards the others in its node."""
        return self.inside_bytes_per_s * (self.reached[group.inside - 1] if self.reached else 1.0)

    def _ring_s(self, group: Group) -> float:
        """All members pass on at the same time, so each step takes as long as the slowest."""
        step = self.inside_latency_s if group.nodes == 1 else self.between_latency_s
        return (group.size - 1) * step

    def _tree_s(self, group: Group) -> float:
        return math.log2(group.inside) * self.inside_latency_s + math.log2(group.nodes) * self.between_latency_s


def _met(places: int, draws: int) -> float:
    """Of so many alike places, how many are met by so many draws, in the mean."""
    return places * (1 - (1 - 1 / places) ** draws)

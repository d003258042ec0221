"""The Fleet: many alike nodes as one pool, so that 25,000 devices are a few lines and cost a planner no more than their kinds.

A `Cluster` lists devices one by one and is what a run needs; a Fleet says how many there are of what, where they stand, what they cost.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeVar

from heterodyne.errors import ClusterError

__all__ = ["Fleet", "Pool", "Wire"]

_Value = TypeVar("_Value")


@dataclass(frozen=True, kw_only=True, slots=True)
class Wire:
    """What a link carries in one direction, and how long the first byte takes."""

    bandwidth_bytes_per_s: float
    latency_s: float


@dataclass(frozen=True, kw_only=True)
class Pool:
    """Alike nodes that stand in one place.

    Args:
        name: unique in the fleet.
        kind: of the devices; a name of the catalog.
        nodes, devices_per_node: how many.
        memory_bytes: of a device.
        inside: between two devices of a node, by device.
        between: from a node of the pool to another one of it, by node; None for a single node.
        place: from the outside in, as ``("us-east", "zone-a", "pod-3")``. Pools of one place share its network.
        usd_per_device_hour: None if not known.
        watts_per_device: None if not known.
    """

    name: str
    kind: str
    nodes: int
    devices_per_node: int
    memory_bytes: int
    inside: Wire
    between: Wire | None = None
    place: tuple[str, ...] = ()
    backend: str = "cuda"
    usd_per_device_hour: float | None = None
    spot: bool = False
    watts_per_device: float | None = None

    @property
    def devices(self) -> int:
        return self.nodes * self.devices_per_node


@dataclass(frozen=True, kw_only=True)
class Fleet:
    """Pools, and what joins them.

    Args:
        links: of two pools (by name) or two places (joined by ``/``), or of what stands inside one of these (both ends equal): what a
            node has towards nodes on the other side. The most special one that covers two pools counts.
        usd_per_byte: of traffic between two places, in the same words.

    Raises ClusterError if there is no pool, a name is used twice, or a link names nothing that is there.
    """

    name: str
    pools: tuple[Pool, ...]
    links: Mapping[tuple[str, str], Wire] = field(default_factory=dict)
    usd_per_byte: Mapping[tuple[str, str], float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.pools:
            raise ClusterError(f"fleet {self.name!r} has no devices; give at least one pool of nodes")
        names = [pool.name for pool in self.pools]
        if len(set(names)) < len(names):
            twice = sorted({name for name in names if names.count(name) > 1})
            raise ClusterError(f"names of pools must be unique; used more than once: {', '.join(twice)}")
        known = set(names) | {
            self._word(pool.place[:depth]) for pool in self.pools for depth in range(1, len(pool.place) + 1)
        }
        unknown = sorted({end for ends in (*self.links, *self.usd_per_byte) for end in ends} - known)
        if unknown:
            raise ClusterError(
                f"a link names what is not there: {', '.join(unknown)}; there are {', '.join(sorted(known))}"
            )

    @property
    def devices(self) -> int:
        return sum(pool.devices for pool in self.pools)

    @property
    def kinds(self) -> tuple[str, ...]:
        """Of devices, in the order of the pools."""
        return tuple(dict.fromkeys(pool.kind for pool in self.pools))

    @cached_property
    def _by_name(self) -> dict[str, Pool]:
        return {pool.name: pool for pool in self.pools}

    def pool(self, name: str) -> Pool:
        """Raises ClusterError."""
        try:
            return self._by_name[name]
        except KeyError:
            raise ClusterError(f"there is no pool {name!r}; the fleet has {', '.join(self._by_name)}") from None

    def wire(self, a: Pool, b: Pool) -> Wire | None:
        """What a node of one pool has towards a node of the other (the same pool: another of its nodes); None if that is not known."""
        if a.name == b.name and a.between is not None:
            return a.between
        found = self._between(a, b, self.links)
        if found is not None:
            return found
        return None if a.name == b.name or a.place != b.place else _slower(a.between, b.between)

    def traffic_usd_per_byte(self, a: Pool, b: Pool) -> float:
        """Nothing where no price is stated."""
        return self._between(a, b, self.usd_per_byte) or 0.0

    def _between(self, a: Pool, b: Pool, stated: Mapping[tuple[str, str], _Value]) -> _Value | None:
        """The value of the narrowest ends that hold the two pools."""
        for left in self._ends(a):
            for right in self._ends(b):
                for ends in ((left, right), (right, left)):
                    if ends in stated:
                        return stated[ends]
        return None

    def _ends(self, pool: Pool) -> list[str]:
        return [pool.name, *(self._word(pool.place[:depth]) for depth in range(len(pool.place), 0, -1))]

    @staticmethod
    def _word(place: tuple[str, ...]) -> str:
        return "/".join(place)


def _slower(a: Wire | None, b: Wire | None) -> Wire | None:
    if a is None or b is None:
        return a or b
    return Wire(
        bandwidth_bytes_per_s=min(a.bandwidth_bytes_per_s, b.bandwidth_bytes_per_s),
        latency_s=max(a.latency_s, b.latency_s),
    )

"""The Fleet: many alike nodes as one pool, so that 25,000 devices are a few lines and cost a planner no more than their kinds.

A `Cluster` lists devices one by one and is what a run needs; a Fleet says how many there are of what, where they stand, what they cost.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import product
from typing import Final, TypeVar

from heterodyne.cluster.catalog import Accelerator, find, lookup
from heterodyne.errors import ClusterError

__all__ = ["EVERYWHERE", "Fleet", "Pool", "Wire", "listed"]

EVERYWHERE: Final = "all"
"""As an end of a link: whatever is in the fleet."""

_Value = TypeVar("_Value")


@dataclass(frozen=True, kw_only=True, slots=True)
class Wire:
    """What a link carries in one direction, and how long the first byte takes."""

    bandwidth_bytes_per_s: float
    latency_s: float

    def __post_init__(self) -> None:
        if not self.bandwidth_bytes_per_s > 0 or not self.latency_s >= 0:
            raise ClusterError(
                f"a link needs a bandwidth above 0 and a latency of 0 or more, not {self.bandwidth_bytes_per_s} B/s and {self.latency_s} s"
            )


@dataclass(frozen=True, kw_only=True)
class Pool:
    """Alike nodes that stand in one place, or their devices of one kind if they hold several.

    Args:
        name: unique in the fleet.
        kind: of the devices; a name of the catalog, or one of the fleet's own `accelerators`.
        nodes, devices_per_node: how many.
        memory_bytes: of a device.
        inside: between two devices of a node, by device; None if that is not known, or there is one device only.
        between: from a node of the pool to another one of it, by node; None for a single node, or if it is not known.
        place: from the outside in, as ``("us-east", "zone-a", "pod-3")``. Pools of one place share its network.
        usd_per_device_hour: None if not known.
        spot: whether the devices can be taken away at any time.
        watts_per_device: None if not known.
        node: what its nodes are called, as ``new`` of ``new-0``; "": as the pool. Pools of one such name stand in the same nodes.
        numbered: whether a number follows; False only for a single node.
        host_memory_bytes: of the host of each node; None if not known.

    Raises ClusterError for numbers that cannot be.
    """

    name: str
    kind: str
    nodes: int
    devices_per_node: int
    memory_bytes: int
    inside: Wire | None = None
    between: Wire | None = None
    place: tuple[str, ...] = ()
    backend: str = "cuda"
    usd_per_device_hour: float | None = None
    spot: bool = False
    watts_per_device: float | None = None
    node: str = ""
    numbered: bool = True
    host_memory_bytes: int | None = None

    def __post_init__(self) -> None:
        if min(self.nodes, self.devices_per_node, self.memory_bytes) < 1:
            raise ClusterError(f"pool {self.name!r} needs at least one node, one device on it and a byte of memory")
        if min(self.usd_per_device_hour or 0, self.watts_per_device or 0) < 0:
            raise ClusterError(f"pool {self.name!r} has a price or watts below 0")
        if self.nodes > 1 and not self.numbered:
            raise ClusterError(f"the {self.nodes} nodes of pool {self.name!r} need numbers to be distinguished")

    @property
    def places(self) -> tuple[str, ...]:
        """The places around it, from the outside in."""
        return tuple(_word(self.place[: depth + 1]) for depth in range(len(self.place)))

    @property
    def devices(self) -> int:
        return self.nodes * self.devices_per_node

    @property
    def node_name(self) -> str:
        """Return what its nodes are called, without their number; a name that a cluster file can have."""
        return (self.node or self.name).replace("/", ".")

    @property
    def node_names(self) -> tuple[str, ...]:
        return tuple(f"{self.node_name}-{i}" for i in range(self.nodes)) if self.numbered else (self.node_name,)


@dataclass(frozen=True, kw_only=True)
class Fleet:
    """Pools, and what joins them.

    Args:
        links: of two pools (by name) or two places (joined by ``/``), or of what stands inside one of these (both ends equal): what a
            node has towards nodes on the other side. ``all`` is the place around all places. The most special one that covers two
            pools counts.
        usd_per_byte: of traffic between two places, in the same words.
        accelerators: of the kinds that the catalog does not know, or knows otherwise.

    Raises ClusterError if there is no pool, a name is used twice, a link names nothing that is there, or two links cover the same
    pools and neither is the more special one.
    """

    name: str
    pools: tuple[Pool, ...]
    links: Mapping[tuple[str, str], Wire] = field(default_factory=dict)
    usd_per_byte: Mapping[tuple[str, str], float] = field(default_factory=dict)
    accelerators: Mapping[str, Accelerator] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.pools:
            raise ClusterError(f"fleet {self.name!r} has no devices; give at least one pool of nodes")
        names = [pool.name for pool in self.pools]
        if len(set(names)) < len(names):
            twice = sorted({name for name in names if names.count(name) > 1})
            raise ClusterError(f"names of pools must be unique; used more than once: {', '.join(twice)}")
        for pool in self.pools:
            if self._around[pool.name] != _around(pool.name, pool.place):
                raise ClusterError(f"{pool.name!r} is the name of a pool and of a place that it is not in; rename one")
        standing: dict[str, Pool] = {}
        for pool in self.pools:
            other = standing.setdefault(pool.node_name, pool)
            if (pool.node or pool.name, pool.nodes, pool.place) != (other.node or other.name, other.nodes, other.place):
                raise ClusterError(
                    f"the nodes of pools {other.name} and {pool.name} have the same names but are not the same; rename one"
                )
        for stated in (self.links, self.usd_per_byte):
            self._check(stated)

    @property
    def devices(self) -> int:
        return sum(pool.devices for pool in self.pools)

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of devices, in the order of the pools."""
        return tuple(dict.fromkeys(pool.kind for pool in self.pools))

    @property
    def places(self) -> tuple[str, ...]:
        """Every place, from the outside in, in the order of the pools."""
        return tuple(dict.fromkeys(place for pool in self.pools for place in pool.places))

    def pool(self, name: str) -> Pool:
        """Raises ClusterError."""
        try:
            return self._by_name[name]
        except KeyError:
            raise ClusterError(f"there is no pool {name!r}; there are {listed(self._by_name)}") from None

    def accelerator(self, kind: str) -> Accelerator:
        """Return what is known of a kind. Raises ClusterError for a kind that neither the fleet nor the catalog knows."""
        return self.accelerators.get(kind) or find(kind) or lookup(kind)

    def require_prices(self) -> None:
        """Raises ClusterError that lists the pools of which no price is known."""
        without = [pool for pool in self.pools if pool.usd_per_device_hour is None]
        if without:
            seen = (f"{pool.name} ({pool.kind}{self._prices_seen(pool.kind)})" for pool in without)
            raise ClusterError(
                f"no price is stated for {listed(seen)}; give 'prices: {{{without[0].kind}: 2.50}}', in usd per device and hour"
            )

    def wire(self, a: Pool, b: Pool) -> Wire | None:
        """Return what a node of one pool has towards a node of the other (the same pool: another of its nodes); None if that is not known.

        Of two pools in one and the same node it is what joins the devices of that node.
        """
        if a.name == b.name and a.between is not None:
            return a.between
        if a.name != b.name and a.nodes == b.nodes == 1 and a.node_name == b.node_name:
            return _slower(a.inside, b.inside)
        found = self._between(a, b, self.links)
        if found is not None:
            return found
        return None if a.name == b.name or a.place != b.place else _slower(a.between, b.between)

    def traffic_usd_per_byte(self, a: Pool, b: Pool) -> float:
        """Nothing where no price is stated."""
        return self._between(a, b, self.usd_per_byte) or 0.0

    @cached_property
    def _by_name(self) -> dict[str, Pool]:
        return {pool.name: pool for pool in self.pools}

    @cached_property
    def _around(self) -> dict[str, tuple[str, ...]]:
        """For each pool and place: itself and the places that it is in, from the inside out."""
        around: dict[str, tuple[str, ...]] = {EVERYWHERE: (EVERYWHERE,)}
        for pool in self.pools:
            for depth in range(1, len(pool.place) + 1):
                around[_word(pool.place[:depth])] = _around(_word(pool.place[:depth]), pool.place[:depth])
        for pool in self.pools:
            around.setdefault(pool.name, _around(pool.name, pool.place))
        return around

    def _between(self, a: Pool, b: Pool, stated: Mapping[tuple[str, str], _Value]) -> _Value | None:
        """The value of the narrowest ends that hold the two pools."""
        if not stated:
            return None
        left, right = self._around[a.name], self._around[b.name]
        covering = (
            (-i - j, value)
            for (i, x), (j, y) in product(enumerate(left), enumerate(right))
            for value in (stated.get((x, y)), stated.get((y, x)))
            if value is not None
        )
        return max(covering, key=lambda found: found[0], default=(0, None))[1]

    def _check(self, stated: Mapping[tuple[str, str], object]) -> None:
        unknown = sorted({end for ends in stated for end in ends} - set(self._around))
        if unknown:
            there = listed(word for word in self._around if word != EVERYWHERE)
            raise ClusterError(f"a link names what is not there: {', '.join(unknown)}; there are {there}")
        for a, b in stated:
            if a != b and (b, a) in stated:
                raise ClusterError(f"the link between {a} and {b} is given twice")
            if a != b and (a in self._around[b] or b in self._around[a]):
                raise ClusterError(f"a link joins {a} and {b}, but one of them stands inside the other")
        for one, other in self._rivals(stated):
            raise ClusterError(
                f"the links [{', '.join(one)}] and [{', '.join(other)}] cover the same pools and neither is the more special one; "
                "give one for the places that both cover"
            )

    def _rivals(self, stated: Mapping[tuple[str, str], object]) -> Iterator[tuple[tuple[str, str], tuple[str, str]]]:
        """Links that cover some pools in common, one of them being narrower at one end and wider at the other."""
        around = self._around
        turned = list(dict.fromkeys(ends for a, b in stated for ends in ((a, b), (b, a))))
        every = set(turned)
        for x, y in turned:
            if len(around[x]) <= len(around[y]):
                continue  # of two rivals at least one is narrower at one end than at the other: begin with that end
            for u, v in turned:
                if u in around[x][1:] and y in around[v][1:] and (x, v) not in every:
                    yield (x, y), (u, v)

    def _prices_seen(self, kind: str) -> str:
        known = self.accelerators.get(kind) or find(kind)
        seen = sorted(price.usd_per_hour for price in known.prices) if known else []
        if not seen:
            return ""
        return f", seen at {seen[0]:.2f}" + (f" to {seen[-1]:.2f}" if len(seen) > 1 else "")


def listed(names: Iterable[str], most: int = 12) -> str:
    """``a, b, c``; of many just the first, and how many more there are."""
    every = list(names)
    return ", ".join(every[:most]) + (f" and {len(every) - most} more" if len(every) > most else "")


def _word(place: tuple[str, ...]) -> str:
    return "/".join(place)


def _around(name: str, place: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(dict.fromkeys((name, *(_word(place[:depth]) for depth in range(len(place), 0, -1)), EVERYWHERE)))


def _slower(a: Wire | None, b: Wire | None) -> Wire | None:
    if a is None or b is None:
        return a or b
    return Wire(
        bandwidth_bytes_per_s=min(a.bandwidth_bytes_per_s, b.bandwidth_bytes_per_s),
        latency_s=max(a.latency_s, b.latency_s),
    )

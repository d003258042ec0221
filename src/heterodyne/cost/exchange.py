"""Collectives of a sharded stage: bytes between its members, and seconds.

Every such collective is one or two rounds, in each of which each member sends each other member what that one needs
(`heterodyne.runtime.split.group`). A member has one port: it sends its messages one after another and receives meanwhile (Bhat,
Raghavendra and Prasanna, "Efficient collective communication in distributed heterogeneous systems", JPDC 2003); a CPU does both itself.
A link shared by several pairs carries one message at a time. So the network part of a round takes a latency plus the busiest port or
link. Before and after it each member packs what it sends, and unpacks or sums what it has received: all of it is read and written once
more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TypeAlias

from heterodyne.cluster.spec import Cluster
from heterodyne.cost.collective import AlphaBeta, Collectives
from heterodyne.cost.routes import link_between
from heterodyne.graph.sharding.layout import Collective, reduced_at_once
from heterodyne.plan.relays import hosts_of, members_of

__all__ = ["Round", "Wires", "buffer_bytes", "rounds", "to_everyone"]

Round: TypeAlias = tuple[tuple[float, ...], ...]
"""``[i][j]``: the bytes that member i has for member j. What it has for itself does not travel, but is copied."""


def rounds(
    kind: Collective,
    size_bytes: float,
    members: int,
    *,
    source: Sequence[int] = (),
    target: Sequence[int] = (),
    same_dim: bool = False,
) -> tuple[Round, ...]:
    """The rounds of a collective on a tensor of ``size_bytes`` bytes in all.

    Args:
        source, target: the sizes of the members' slices, where it is sharded before and where it is sharded afterwards.
        same_dim: sharded in one dim both times.
    """
    if kind == "all_gather":
        return (tuple((part,) * members for part in _parts(source, size_bytes)),)
    if kind == "reduce_scatter":
        return ((_parts(target, size_bytes),) * members,)
    if kind == "all_to_all" and same_dim:
        return (_overlaps(source, target, size_bytes),)
    if kind == "all_to_all":
        return (tuple(_parts(target, own) for own in _parts(source, size_bytes)),)
    if reduced_at_once(size_bytes, members):
        return (to_everyone(size_bytes, members),)
    even = (1,) * members
    return (
        *rounds("reduce_scatter", size_bytes, members, target=even),
        *rounds("all_gather", size_bytes, members, source=even),
    )


def to_everyone(size_bytes: float, members: int) -> Round:
    """Each member sends so much to each other one."""
    return ((size_bytes,) * members,) * members


def _parts(sizes: Sequence[int], size_bytes: float) -> tuple[float, ...]:
    total = sum(sizes)
    return tuple(size_bytes * size / total if total else 0.0 for size in sizes)


def _overlaps(source: Sequence[int], target: Sequence[int], size_bytes: float) -> Round:
    """Bytes of the overlap of each source slice with each target slice of one dim."""
    total = sum(source)
    unit = size_bytes / total if total else 0.0
    before, after = (list(pairwise(accumulate(sizes, initial=0))) for sizes in (source, target))
    return tuple(
        tuple(unit * max(0, min(high, stop) - max(low, first)) for first, stop in after) for low, high in before
    )


def buffer_bytes(exchanged: Round) -> float:
    """Peak bytes of a member's buffers: send, receive, and the result after the send buffer is freed."""
    received = map(sum, zip(*exchanged, strict=True))
    return max((came + max(sum(left), came) for left, came in zip(exchanged, received, strict=True)), default=0.0)


@dataclass(frozen=True, kw_only=True)
class Wires:
    """The links between the members of a sharded stage.

    Args:
        transfers: ``[i][j]``: cost of a transfer from member i to member j.
        links: ``[i][j]``: the name of its link.
        ports: of each member, for what it sends and for what it receives; ports of one name do one thing at a time.
        copies_s_per_byte: seconds in which each member reads or writes a byte of its memory.
        met: what a collective between members that compute meanwhile adds, by the bytes of each for each other one, where that was
            measured: then it replaces transfers, links and ports.
        inside: of members on several hosts, those of each host and the links between them.
        by_hand: members copy bytes into the memory of a link and out of it themselves, as CPUs do.
    """

    transfers: tuple[tuple[AlphaBeta, ...], ...]
    links: tuple[tuple[str, ...], ...]
    ports: tuple[tuple[str, str], ...]
    copies_s_per_byte: tuple[float, ...]
    met: AlphaBeta | None = None
    inside: tuple[tuple[tuple[int, ...], Wires], ...] = ()
    by_hand: bool = False

    @classmethod
    def between(
        cls, devices: Sequence[str], cluster: Cluster, collectives: Collectives, copies_s_per_byte: Sequence[float]
    ) -> Wires:
        """Raises MeasureError if nothing is known of a link."""
        hosts = members_of(hosts_of([cluster.device(device).node for device in devices]))

        def of_host(members: tuple[int, ...]) -> Wires:
            return cls.between(
                [devices[n] for n in members], cluster, collectives, [copies_s_per_byte[n] for n in members]
            )

        return cls(
            transfers=tuple(tuple(collectives.send(a, b) for b in devices) for a in devices),
            links=tuple(tuple(link_between(cluster, a, b) for b in devices) for a in devices),
            ports=tuple((a, a) if cluster.device(a).backend == "cpu" else (f"from {a}", f"to {a}") for a in devices),
            copies_s_per_byte=tuple(copies_s_per_byte),
            met=collectives.exchange(devices),
            inside=tuple((members, of_host(members)) for members in hosts) if len(hosts) > 1 else (),
            by_hand=any(cluster.device(d).backend == "cpu" for d in devices),
        )

    def divided(self, exchanged: Sequence[Round]) -> tuple[float, float, float]:
        """Seconds from the arrival of the last member until all are done: those in which the members are busy, those of latency, and those
        in which messages fill the network.
        """
        own, latency, transfer = 0.0, 0.0, 0.0
        for each in exchanged:
            latency_s, bytes_s = self._on_the_way_s(each)
            carried_s = min(bytes_s, self._carried_s(each)) if self.by_hand else 0.0
            own += self._copies_s(each) + carried_s
            latency += latency_s
            transfer += bytes_s - carried_s
        return own, latency, transfer

    def _carried_s(self, exchanged: Sequence[Sequence[float]]) -> float:
        """Seconds in which the busiest member copies its messages into the memory of the link and out of it."""
        moved = self._sent_and_received(exchanged)
        return max(2 * byte_s * size for byte_s, size in zip(self.copies_s_per_byte, moved, strict=True))

    @staticmethod
    def _sent_and_received(exchanged: Sequence[Sequence[float]]) -> list[float]:
        """Bytes of each member, to others and from them."""
        places = range(len(exchanged))
        return [
            sum(exchanged[own][other] + exchanged[other][own] for other in places if other != own) for own in places
        ]

    def _inside_s(self, exchanged: Sequence[Sequence[float]]) -> tuple[float, float]:
        """Latency and seconds of transfer among the members of one host. CPUs there share memory: where their exchanges were not measured,
        they take no longer than the copies.
        """
        latency_s, bytes_s = self._on_the_way_s(exchanged)
        shared = self.by_hand and self.met is None
        return latency_s, min(bytes_s, self._carried_s(exchanged)) if shared else bytes_s

    @staticmethod
    def _crossing(exchanged: Sequence[Sequence[float]], members: Sequence[int]) -> float:
        """Bytes that leave the members of a host and come to them, by pair with a member of another one and direction."""
        others = [other for other in range(len(exchanged)) if other not in members]
        pairs = [(own, other) for own in members for other in others]
        return sum(exchanged[own][other] + exchanged[other][own] for own, other in pairs) / (2 * len(pairs))

    def _copies_s(self, exchanged: Round) -> float:
        """Packing before and unpacking after, a member's own part included."""
        left, came = map(sum, exchanged), map(sum, zip(*exchanged, strict=True))
        each = list(zip(self.copies_s_per_byte, left, came, strict=True))
        return 2 * (max(byte_s * size for byte_s, size, _ in each) + max(byte_s * size for byte_s, _, size in each))

    def _on_the_way_s(self, exchanged: Sequence[Sequence[float]]) -> tuple[float, float]:
        """Latency, and seconds of transfer. What stays on the hosts takes as long as on the slowest one."""
        crossing = [self._crossing(exchanged, members) for members, _ in self.inside]
        if crossing and not any(crossing):
            parts = ([[exchanged[i][j] for j in members] for i in members] for members, _ in self.inside)
            return max((wires._inside_s(part) for part, (_, wires) in zip(parts, self.inside, strict=True)), key=sum)
        if self.met is not None:
            # The bytes for each other member of an even exchange that takes as long on the links of the hosts, or in the ports.
            others = max(sum(map(bool, row)) - bool(row[own]) for own, row in enumerate(exchanged))
            each = max(crossing, default=max(self._sent_and_received(exchanged)) / (2 * max(1, others)))
            return self.met.latency_s, self.met.s_per_byte * each
        latency_s = 0.0
        busy: dict[str, float] = {}  # seconds of each port and of each link
        for source, row in enumerate(exchanged):
            for target, size in enumerate(row):
                if source == target or not size:
                    continue
                cost = self.transfers[source][target]
                latency_s = max(latency_s, cost.latency_s)
                for name in (self.ports[source][0], self.ports[target][1], self.links[source][target]):
                    busy[name] = busy.get(name, 0.0) + cost.s_per_byte * size
        return latency_s, max(busy.values(), default=0.0)

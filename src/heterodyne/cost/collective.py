"""Seconds of collectives and point-to-point transfers, from measurements of the real links where there are any.

A transfer of B bytes takes alpha + beta B (Hockney, "The communication challenge for MPP", 1994). A ring all-reduce among n devices is 2
(n - 1) transfers of B / n bytes (Patarasuk and Yuan, 2009): so a measured group is scaled to a smaller or larger one, and point-to-point
measurements give a collective that was not measured.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import combinations, pairwise
from math import sqrt

from heterodyne.cluster.profile import LinkSample
from heterodyne.cluster.spec import Cluster, Link
from heterodyne.cost.islands import gathered, islands_of, reduced
from heterodyne.errors import MeasureError
from heterodyne.graph.sharding.price import LATENCY_BYTES
from heterodyne.plan.islands import uplink

__all__ = ["FREE", "AlphaBeta", "Collectives", "fit"]


@dataclass(frozen=True, slots=True)
class AlphaBeta:
    """``latency_s + s_per_byte * bytes``. ``error``: the largest relative distance of a sample from it."""

    latency_s: float
    s_per_byte: float
    error: float = 0.0

    def __call__(self, size_bytes: float) -> float:
        return self.latency_s + self.s_per_byte * size_bytes

    def relative_to(self, other: AlphaBeta) -> tuple[float, float]:
        """Latency and seconds per byte, as factors of those of another one; 1 where that has none."""
        return self.latency_s / other.latency_s if other.latency_s else 1.0, self.s_per_byte / other.s_per_byte

    def scaled(self, latency: float, bandwidth: float) -> AlphaBeta:
        """Latency and seconds per byte, each times a factor."""
        return AlphaBeta(self.latency_s * latency, self.s_per_byte * bandwidth, self.error)


FREE = AlphaBeta(0.0, 0.0)
_NUMBER_BYTES = 8
_BUCKET_BYTES = 4 * 2**20  # where links are not known


def fit(samples: Iterable[tuple[float, float]]) -> AlphaBeta:
    """The non-negative alpha and beta with the least sum of squared *relative* errors over ``(bytes, seconds)``.

    Relative, because messages range over five decimal orders and a plain fit would see only the largest.
    Raises ValueError without a sample of positive seconds.
    """
    points = [(size, seconds) for size, seconds in samples if seconds > 0]
    if not points:
        raise ValueError("a fit needs at least one sample of positive seconds")
    # Minimise sum (alpha u + beta v - 1)^2 with u = 1/t, v = size/t: normal equations of two unknowns.
    uu = sum(1 / t**2 for _, t in points)
    uv = sum(x / t**2 for x, t in points)
    vv = sum(x * x / t**2 for x, t in points)
    u, v = sum(1 / t for _, t in points), sum(x / t for x, t in points)
    determinant = uu * vv - uv * uv
    # Where both are free and one comes out negative, the optimum lies on that edge, since the problem is convex.
    corners = [(u / uu, 0.0)] + ([(0.0, v / vv)] if vv > 0 else [])
    if determinant > 1e-12 * uu * vv:
        alpha, beta = (u * vv - v * uv) / determinant, (v * uu - u * uv) / determinant
        if alpha >= 0 and beta >= 0:
            corners = [(alpha, beta)]
    elif vv > 0:
        corners = corners[1:]  # one size only: nothing tells latency from bandwidth, and large messages matter most

    def squares(corner: tuple[float, float]) -> float:
        return sum(((corner[0] + corner[1] * x) / t - 1) ** 2 for x, t in points)

    alpha, beta = min(corners, key=squares)
    return AlphaBeta(alpha, beta, max(abs((alpha + beta * x) / t - 1) for x, t in points))


@dataclass(frozen=True, kw_only=True)
class Collectives:
    """The links of a cluster: measurements first, then the cluster file."""

    cluster: Cluster
    samples: tuple[LinkSample, ...] = ()
    _overs: dict[tuple[str, ...], OverIslands | None] = field(default_factory=dict, repr=False, compare=False)
    _sends: dict[tuple[str, str], AlphaBeta] = field(default_factory=dict, repr=False, compare=False)

    @cached_property
    def _reduces(self) -> dict[frozenset[str], AlphaBeta]:
        groups = sorted({frozenset(s.devices) for s in self.samples if s.op == "all_reduce"}, key=sorted)
        return {group: fit(self._points("all_reduce", group)) for group in groups if len(group) > 1}

    def _points(self, op: str, group: frozenset[str]) -> list[tuple[float, float]]:
        return [(s.bytes, s.seconds) for s in self.samples if s.op == op and frozenset(s.devices) == group]

    def send(self, source: str, destination: str) -> AlphaBeta:
        """One transfer; 0 between a device and itself. Raises MeasureError if nothing is known of the link.

        In order of trust: this pair measured; the cluster file; other pairs of devices of the same backends and nodes; the smallest
        measured collective that contains both.
        """
        if source == destination:
            return FREE
        if (source, destination) not in self._sends:
            self._sends[source, destination] = self._send(source, destination)
        return self._sends[source, destination]

    def _send(self, source: str, destination: str) -> AlphaBeta:
        exact = [
            (s.bytes, s.seconds) for s in self.samples if s.op == "send" and s.devices == (source, destination)
        ] or self._points("send", frozenset((source, destination)))
        if exact:
            return fit(exact)
        link = self.cluster.link(source, destination)
        alike = self._alike.get(self._ends((source, destination)))
        if link is None and alike:
            return fit(alike)
        around = [group for group in self._reduces if {source, destination} <= group]
        if link is None and around:
            near = min(around, key=lambda g: (len(g), sorted(g)))
            count = len(near)  # a ring makes 2 (n - 1) transfers of B / n bytes
            return self._reduces[near].scaled(1 / (2 * (count - 1)), count / (2 * (count - 1)))
        if link is None:
            raise MeasureError(
                f"nothing is known of the link between {source} and {destination}: "
                "measure it with 'heterodyne measure' (in parallelism.measure_s seconds, which may have been too few), or give its "
                "bandwidth and latency in the cluster file"
            )
        return AlphaBeta(link.latency_s, 1 / link.bandwidth_bytes_per_s)

    def bucket_bytes(self, gradients: int) -> int:
        """Bytes of a gradient bucket with which an all-reduce over all devices costs least, of so many bytes in all.

        G bytes of gradients in buckets of n bytes pay the latency a of an all-reduce G / n times. All buckets but the last overlap with
        the backward, and the last takes n b, at b seconds per byte. The sum is least at n = sqrt(a G / b). Where nothing is known of a
        link it is 4 MiB.
        """
        try:
            cost = self.all_reduce([device.id for device in self.cluster.devices])
        except MeasureError:
            return _BUCKET_BYTES
        if not cost.s_per_byte or not cost.latency_s:
            return _BUCKET_BYTES
        return max(1, round(min(float(gradients), sqrt(cost.latency_s * gradients / cost.s_per_byte))))

    @cached_property
    def _alike(self) -> dict[frozenset[tuple[str, str]], list[tuple[float, float]]]:
        """Measured transfers, by their ends."""
        found: dict[frozenset[tuple[str, str]], list[tuple[float, float]]] = {}
        here = {device.id for device in self.cluster.devices}
        for sample in self.samples:
            if sample.op == "send" and here.issuperset(sample.devices):
                found.setdefault(self._ends(sample.devices), []).append((sample.bytes, sample.seconds))
        return found

    def _ends(self, devices: Sequence[str]) -> frozenset[tuple[str, str]]:
        """The nodes and backends of devices."""
        return frozenset((own.node, own.backend) for own in self.cluster.devices if own.id in devices)

    def busy(self, device: str, other: str) -> AlphaBeta:
        """Compute seconds of ``device`` per message to or from ``other``; 0 where no processor carries it.

        For a pair that was not measured: the mean of the device's measured pairs.
        """
        of = [s for s in self.samples if s.op == "send" and device in s.devices and any(s.busy_s)]
        near = [s for s in of if other in s.devices] or of
        points = [(s.bytes, own) for s in near if (own := s.busy_s[s.devices.index(device)]) > 0]
        return fit(points) if points and device != other else FREE

    def exchange(self, devices: Sequence[str]) -> AlphaBeta | None:
        """What a frequent all-to-all adds to the computing of its members, by the bytes that each has for each other one; None if not
        measured.

        For a subset of measured devices of a node: the last of n independent arrivals, uniform over some time, comes after n / (n + 1)
        of it, and a single one after half; so waiting goes as (n - 1) / (n + 1).
        """
        group = frozenset(devices)
        groups = {frozenset(s.devices) for s in self.samples if s.op == "exchange"}
        if group in groups:
            return fit(self._points("exchange", group))
        around = [g for g in groups if g > group and len({self.cluster.device(d).node for d in g}) == 1]
        if not around or len(group) < 2:
            return None
        near = min(around, key=lambda g: (len(g), sorted(g)))
        return fit(self._points("exchange", near)).scaled(_waits(len(group)) / _waits(len(near)), 1.0)

    def in_shared_memory(self, devices: Iterable[str]) -> bool:
        """Whether they are processors of one machine, which add up in memory that all of them see."""
        of = [self.cluster.device(device) for device in devices]
        return len({device.node for device in of}) == 1 and all(device.backend == "cpu" for device in of)

    def meeting_s(self, devices: Sequence[str]) -> float:
        """Seconds in which devices agree on a number. A sum in shared memory is two meetings, one before and one after it."""
        return self.all_reduce(devices)(_NUMBER_BYTES) / (2 if self.in_shared_memory(devices) else 1)

    def reduce_scatter(self, devices: Sequence[str], shares: Sequence[int]) -> AlphaBeta:
        """A reduce-scatter or all-gather of shards in proportion to ``shares``; 0 for one device.

        With equal shards it is half an all-reduce. Each device sends all but its own shard, in pipelined chunks, so the one with the
        smallest sends most: N - s bytes, where equal shards send N (n - 1) / n. Over islands it is to an all-reduce as what passes their
        links in both.
        """
        total, count = sum(shares), len(shares)
        if count < 2 or not total:
            return FREE
        over = self.over_islands(devices)
        if over is not None:
            share_of = dict(zip(devices, shares, strict=True))
            part = over.gather([sum(map(share_of.__getitem__, island)) for island in over.islands])
            return self.all_reduce(devices).scaled(*part.relative_to(over.reduce()))
        most = (total - min(shares)) / total
        latency = 1.0 if self.in_shared_memory(devices) else 0.5
        return self.all_reduce(devices).scaled(latency, 0.5 * most * count / (count - 1))

    def ring_s(self, devices: Sequence[str], shares: Sequence[int], size_bytes: float) -> float:
        """Seconds of a reduce-scatter or all-gather of so many bytes as a ring of messages, whatever an all-reduce takes.

        Chunks of c bytes are pipelined: N / c latencies, over the slowest link N - s bytes, and 2 (n - 2) c for the last chunk to come
        round. A rank sends its first chunks at once, so for two ranks the last term is 0.
        """
        total, count = sum(shares), len(shares)
        if count < 2 or not total or not size_bytes:
            return 0.0
        links = [self.send(a, b) for a, b in pairwise([*devices, devices[0]])]
        slowest = max(link.s_per_byte for link in links)
        chunk = min(size_bytes, sqrt(size_bytes * LATENCY_BYTES / (2 * (count - 1))))
        most = size_bytes * (total - min(shares)) / total
        latencies = max(1.0, most / chunk) * max(link.latency_s for link in links)
        return latencies + slowest * (most + 2 * (count - 2) * chunk)

    def over_islands(self, devices: Sequence[str]) -> OverIslands | None:
        """None where the devices are one island, or each is one, or a link is not known."""
        key = tuple(devices)
        if key not in self._overs:
            islands = islands_of(self.cluster, devices)
            try:
                self._overs[key] = self._between(islands) if islands else None
            except (
                MeasureError,
                ZeroDivisionError,
            ):  # no link is known, or bytes take no time on one that was measured
                self._overs[key] = None
        return self._overs[key]

    def _between(self, islands: Sequence[Sequence[str]]) -> OverIslands:
        node_of = {device.id: device.node for device in self.cluster.devices}
        links = []
        for island in islands:
            others = {node_of[name]: name for other in islands if other is not island for name in other}.values()
            of_node = {
                node: min((self.send(name, other) for other in others), key=lambda cost: cost.s_per_byte)
                for node, name in {node_of[name]: name for name in island}.items()
            }
            links.append([(node_of[name], of_node[node_of[name]]) for name in island])
        inside = [self.reduce_scatter(island, [1] * len(island)) for island in islands]
        return OverIslands(
            islands=islands,
            inside=AlphaBeta(max(each.latency_s for each in inside), max(each.s_per_byte for each in inside)),
            latency_s=max(cost.latency_s for of in links for _, cost in of),
            bandwidths=tuple(uplink([node for node, _ in of], [1 / cost.s_per_byte for _, cost in of]) for of in links),
        )

    def to_other_hosts(self) -> list[Link] | None:
        """Return the fastest link to another host that the host of each device has; None where nothing is known of one."""
        first = {device.node: device.id for device in reversed(self.cluster.devices)}  # a device of each node
        fastest = {}
        for node, name in first.items():
            try:
                costs = {other: self.send(name, far) for other, far in first.items() if other != node}
            except MeasureError:
                return None
            if not costs or not all(cost.s_per_byte for cost in costs.values()):
                return None
            to, cost = min(costs.items(), key=lambda each: each[1].s_per_byte)
            fastest[node] = Link(
                between=(node, to), bandwidth_bytes_per_s=1 / cost.s_per_byte, latency_s=cost.latency_s
            )
        return [fastest[device.node] for device in self.cluster.devices]

    def all_reduce(self, devices: Sequence[str]) -> AlphaBeta:
        """An all-reduce among the devices; nothing for one. Raises MeasureError if nothing is known of a link.

        In order of trust: this very group measured; the smallest measured group around it, else the largest inside it, by
        the ring formula; the slowest link of the group, by the ring formula. Over islands, what passes their links takes the place of the
        ring formula. In shared memory no bytes go round: each device adds up its
        part of what all have there, so it reads and writes as much however many there are, and waits for the last as in `exchange`.
        """
        group = frozenset(devices)
        count = len(group)
        if count < 2:
            return FREE
        if group in self._reduces:
            return self._reduces[group]
        over = self.over_islands(devices)
        several = bool(islands_of(self.cluster, devices))
        near = self._near(group, [g for g in self._reduces if bool(islands_of(self.cluster, sorted(g))) is several])
        if near is None and over is not None:
            return over.reduce()
        if near is None:
            try:
                return self._of_links(group)
            except MeasureError:
                near = self._near(group, self._reduces)
                if near is None:
                    raise
        known = self._reduces[near]
        around = self.over_islands(sorted(near))
        if over is not None and around is not None:
            return known.scaled(*over.reduce().relative_to(around.reduce()))
        if self.in_shared_memory({*group, *near}):
            return known.scaled(_waits(count) / _waits(len(near)), 1.0)
        bandwidth = (2 * (count - 1) / count) / (2 * (len(near) - 1) / len(near))
        return known.scaled((count - 1) / (len(near) - 1), bandwidth)

    @staticmethod
    def _near(group: frozenset[str], known: Iterable[frozenset[str]]) -> frozenset[str] | None:
        """The smallest of the known groups around this one, else the largest inside it."""
        around, inside = [g for g in known if g > group], [g for g in known if g < group]
        if around:
            return min(around, key=lambda g: (len(g), sorted(g)))
        return max(inside, key=lambda g: (len(g), sorted(g)), default=None)

    def _of_links(self, group: frozenset[str]) -> AlphaBeta:
        links = [self.send(a, b) for a, b in combinations(sorted(group), 2)]
        slowest = AlphaBeta(max(link.latency_s for link in links), max(link.s_per_byte for link in links))
        return slowest.scaled(2 * (len(group) - 1), 2 * (len(group) - 1) / len(group))


@dataclass(frozen=True, kw_only=True)
class OverIslands:
    """Islands, and what they cost without measurements of the whole group.

    Args:
        inside: a reduce-scatter or all-gather of equal shards inside the slowest island.
        latency_s: of a message between islands.
        bandwidths: of the link of each to others.
    """

    islands: Sequence[Sequence[str]]
    inside: AlphaBeta
    latency_s: float
    bandwidths: tuple[float, ...]

    def reduce(self) -> AlphaBeta:
        """An all-reduce: inside, sums and totals between, inside."""
        return AlphaBeta(
            2 * (self.latency_s + self.inside.latency_s), reduced(self.bandwidths) + 2 * self.inside.s_per_byte
        )

    def gather(self, shares: Sequence[int]) -> AlphaBeta:
        """An all-gather or reduce-scatter. ``shares``: of each island."""
        return AlphaBeta(
            self.latency_s + self.inside.latency_s, gathered(self.bandwidths, shares) + self.inside.s_per_byte
        )


def _waits(count: int) -> float:
    """How long devices wait for the last one of them, if each comes at a moment of its own: the last of n comes after n / (n + 1) of the
    time, and one by itself after half."""
    return (count - 1) / (count + 1)

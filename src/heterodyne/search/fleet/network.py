"""What goes between nodes: messages between stages, and gradients between the replicas of a layer.

The planner asks through `Network`, so that a better model of collectives can take the place of this one. Here a message takes
alpha + beta B (Hockney, 1994). Gradients go round a ring inside each node and then round one between nodes: 2 (n - 1) / n bytes for each
byte of gradients on every link of a ring of n (Patarasuk and Yuan, 2009). What a node sends for all layers that it holds goes over its
one link; the fullest link is what takes time, and a tree's 2 log2 n messages are what is waited for at least.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil, inf, log2
from typing import Protocol

from heterodyne.cluster.fleet import Fleet, Pool, Wire
from heterodyne.search.fleet.plan import Layout, Stage, Template
from heterodyne.search.fleet.tables import Table

__all__ = ["Network", "Rings", "Synced"]

Placed = Sequence[tuple[Template, int]]
"""Templates, and how many pipelines there are of each."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Synced:
    """The exchange of all gradients, once a step."""

    seconds: float
    usd: float


class Network(Protocol):
    """Seconds and money of what goes between devices."""

    def joined(self, a: str, b: str) -> bool:
        """Whether anything is known of the way between two pools."""

    def send_s(self, template: Template, stage: int, size_bytes: float, layout: Layout) -> float:
        """From a stage of a pipeline to the next one."""

    def sync(self, placed: Placed, table_of: Mapping[Template, Sequence[Table]], layout: Layout) -> Synced:
        """Sum all gradients over the replicas of their layers. ``table_of``: for each template one table a stage."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Share:
    """Of one pool: how many replicas of a stage are on a node, and how many places of a pipeline."""

    replicas: int
    stages: int


@dataclass(frozen=True)
class Rings:
    """The network of a fleet."""

    fleet: Fleet
    _wires: dict[tuple[str, str], Wire | None] = field(default_factory=dict, repr=False)

    def joined(self, a: str, b: str) -> bool:
        return self._wire(a, b) is not None or (a == b and self.fleet.pool(a).nodes == 1)

    def send_s(self, template: Template, stage: int, size_bytes: float, layout: Layout) -> float:
        """Over the wire inside a node, or over the part of a node's link that the pipelines on it leave to each other."""
        source, target = template.stages[stage], template.stages[stage + 1]
        pool = self.fleet.pool(source.pool)
        if source.pool == target.pool and self._same_node(template, stage, pool, layout):
            inside = self._inside(pool)
            return inf if inside is None else inside.latency_s + size_bytes / inside.bandwidth_bytes_per_s
        wire = self._wire(source.pool, target.pool)
        if wire is None:
            return inf
        part = min(self._part(template, source, layout), self._part(template, target, layout))
        return wire.latency_s + size_bytes / (wire.bandwidth_bytes_per_s * part)

    def sync(self, placed: Placed, table_of: Mapping[Template, Sequence[Table]], layout: Layout) -> Synced:
        copies = sum(count for _, count in placed)
        if copies < 2:
            return Synced(seconds=0.0, usd=0.0)
        cuts = sorted(
            {stage.start for t, _ in placed for stage in t.stages}
            | {stage.stop for t, _ in placed for stage in t.stages}
        )
        parts = {start: number for number, start in enumerate(cuts)}
        nodes = [0] * (len(cuts) - 1)
        pools: list[dict[str, None]] = [{} for _ in nodes]
        shares = [
            [self._share(template, stage, count, layout) for stage in template.stages] for template, count in placed
        ]
        for (template, count), own in zip(placed, shares, strict=True):
            for stage, share in zip(template.stages, own, strict=True):
                for part in range(parts[stage.start], parts[stage.stop]):
                    nodes[part] += ceil(count / share.replicas)
                    pools[part][stage.pool] = None
        longest = 0.0
        for (template, _), own in zip(placed, shares, strict=True):
            loads = []
            inside = []
            for stage, share, table in zip(template.stages, own, table_of[template], strict=True):
                load = 0.0
                for part in range(parts[stage.start], parts[stage.stop]):
                    size = table.reduced_bytes(cuts[part], cuts[part + 1])
                    load += self._ring_s(stage.pool, pools[part], nodes[part], size)
                loads.append(load)
                inside.append(self._inside_s(stage, share, table.reduced_bytes(stage.start, stage.stop)))
            longest = max(longest, _fullest(template, template.by_place(loads), template.by_place(inside), own))
        most = max(nodes)
        waits = [self._latency_s(stage.pool, pools[parts[stage.start]]) for t, _ in placed for stage in t.stages]
        latency = 2 * ceil(log2(most)) * max(waits) if most > 1 else 0.0
        first = table_of[placed[0][0]]
        return Synced(seconds=longest + latency, usd=self._traffic_usd(cuts, nodes, pools, placed[0][0], first))

    def _wire(self, a: str, b: str) -> Wire | None:
        if (a, b) not in self._wires:
            self._wires[a, b] = self.fleet.wire(self.fleet.pool(a), self.fleet.pool(b))
        return self._wires[a, b]

    def _inside(self, pool: Pool) -> Wire | None:
        """Where it is not known what joins the devices of a node, what joins nodes is taken."""
        return pool.inside or self._wire(pool.name, pool.name)

    def _same_node(self, template: Template, stage: int, pool: Pool, layout: Layout) -> bool:
        if pool.nodes == 1:
            return True
        if layout == "stages":
            return False
        own = template.devices[pool.name]
        before = sum(home.devices for home in template.homes[: stage % template.places + 1] if home.pool == pool.name)
        if own <= pool.devices_per_node:
            return pool.devices_per_node % own == 0
        return own % pool.devices_per_node == 0 and before % pool.devices_per_node != 0

    def _part(self, template: Template, stage: Stage, layout: Layout) -> float:
        """Of a node's link."""
        pool = self.fleet.pool(stage.pool)
        own = stage.devices if layout == "stages" else template.devices[stage.pool]
        return min(1.0, own / pool.devices_per_node)

    def _share(self, template: Template, stage: Stage, count: int, layout: Layout) -> _Share:
        places = max(1, self.fleet.pool(stage.pool).devices_per_node // stage.devices)
        stages = sum(home.pool == stage.pool for home in template.homes)
        if layout == "stages":
            replicas = min(count, places)
            return _Share(replicas=replicas, stages=min(stages, max(1, places // replicas)))
        stages = min(stages, places)
        return _Share(replicas=min(count, max(1, places // stages)), stages=stages)

    def _ring_s(self, pool: str, others: Mapping[str, None], nodes: int, size_bytes: float) -> float:
        """What a node of a pool sends, over the slowest link that it has to one of the ring."""
        if nodes < 2:
            return 0.0
        slowest = inf
        for other in others:
            wire = self._wire(pool, other)
            if wire is not None:
                slowest = min(slowest, wire.bandwidth_bytes_per_s)
            elif not self.joined(pool, other):
                return inf
        return 2 * (nodes - 1) / nodes * size_bytes / slowest

    def _latency_s(self, pool: str, others: Mapping[str, None]) -> float:
        wires = [self._wire(pool, other) for other in others]
        return max((wire.latency_s for wire in wires if wire is not None), default=0.0)

    def _inside_s(self, stage: Stage, share: _Share, size_bytes: float) -> float:
        if share.replicas < 2:
            return 0.0
        wire = self._inside(self.fleet.pool(stage.pool))
        if wire is None:
            return inf
        ring = 2 * (share.replicas - 1) / share.replicas * size_bytes / stage.width / wire.bandwidth_bytes_per_s
        return ring + 2 * (share.replicas - 1) * wire.latency_s

    def _traffic_usd(
        self,
        cuts: Sequence[int],
        nodes: Sequence[int],
        pools: Sequence[Mapping[str, None]],
        template: Template,
        tables: Sequence[Table],
    ) -> float:
        """A ring through several pools goes from each to the next one and back to the first."""
        if not self.fleet.usd_per_byte:
            return 0.0
        usd = 0.0
        for part, held in enumerate(pools):
            if len(held) < 2:
                continue
            at = next(n for n, stage in enumerate(template.stages) if stage.start <= cuts[part] < stage.stop)
            size = 2 * (nodes[part] - 1) / nodes[part] * tables[at].reduced_bytes(cuts[part], cuts[part + 1])
            row = [self.fleet.pool(name) for name in held]
            row.sort(key=lambda pool: pool.place)
            usd += size * sum(
                self.fleet.traffic_usd_per_byte(a, b) for a, b in zip(row, [*row[1:], row[0]], strict=True)
            )
        return usd


def _fullest(template: Template, loads: Sequence[float], inside: Sequence[float], shares: Sequence[_Share]) -> float:
    """The longest time of a node, which holds some places that follow each other in one pool. ``loads``, ``inside``: by place."""
    longest = 0.0
    for first, stage in enumerate(template.homes):
        last = first
        while (
            last + 1 < len(loads)
            and template.homes[last + 1].pool == stage.pool
            and last + 1 - first < shares[first].stages
        ):
            last += 1
        longest = max(longest, sum(loads[first : last + 1]) + max(inside[first : last + 1]))
    return longest

"""What goes between nodes: messages between stages, and gradients between the replicas of a layer.

The planner asks through `Network`, so that a better model of collectives can take the place of this one. Here a message takes
alpha + beta B (Hockney, 1994). Gradients go round a ring inside each node and then round one between nodes: 2 (n - 1) / n bytes for each
byte of gradients on every link of a ring of n (Patarasuk and Yuan, 2009). What a node sends for all layers that it holds goes over its
one link; the fullest link is what takes time, and a tree's 2 log2 n messages are what is waited for at least.

A stage too has copies of its parameters, where its devices share the sequence or the micro-batch, and of its experts, where it has more
devices than these can be spread over: they are in the rings like those of other pipelines.
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
    """Of one pool: how many replicas of a stage are on a node, how many different stages, and what joins the devices of a node."""

    replicas: int
    stages: int


@dataclass(frozen=True, kw_only=True, slots=True)
class _Spread:
    """How parameters of a stage lie, in copies of so many devices each.

    Args:
        inside: copies (or parts of one) on a node. ``nodes``: of all replicas, that hold the same ones. ``part``: of a copy, on a node.
        width: devices of one copy.
    """

    inside: int
    nodes: int
    part: float
    width: int


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
            # Parts of the sequence and of the micro-batch go side by side, as many as the stage with fewer of them has.
            own = size_bytes / min(source.widths.copies, target.widths.copies)
            return inf if inside is None else inside.latency_s + own / inside.bandwidth_bytes_per_s
        wire = self._wire(source.pool, target.pool)
        if wire is None:
            return inf
        part = min(self._part(template, source, layout), self._part(template, target, layout))
        return wire.latency_s + size_bytes / (wire.bandwidth_bytes_per_s * part)

    def sync(self, placed: Placed, table_of: Mapping[Template, Sequence[Table]], layout: Layout) -> Synced:
        cuts = sorted(
            {stage.start for t, _ in placed for stage in t.stages}
            | {stage.stop for t, _ in placed for stage in t.stages}
        )
        parts = {start: number for number, start in enumerate(cuts)}
        nodes, of_experts = [0] * (len(cuts) - 1), [0] * (len(cuts) - 1)
        pools: list[dict[str, None]] = [{} for _ in nodes]
        shares = [
            [self._share(template, stage, count, layout) for stage in template.stages] for template, count in placed
        ]
        spreads = [
            [
                (
                    self._spread(s, share, count, s.width),
                    self._spread(s, share, count, table.expert_width) if table.expert_width else None,
                )
                for s, share, table in zip(template.stages, own, table_of[template], strict=True)
            ]
            for (template, count), own in zip(placed, shares, strict=True)
        ]
        for (template, _), spread in zip(placed, spreads, strict=True):
            for stage, (dense, expert) in zip(template.stages, spread, strict=True):
                for part in range(parts[stage.start], parts[stage.stop]):
                    nodes[part] += dense.nodes
                    of_experts[part] += expert.nodes if expert else 0
                    pools[part][stage.pool] = None
        longest = 0.0
        for (template, _), own, spread in zip(placed, shares, spreads, strict=True):
            loads = []
            inside = []
            for stage, (dense, expert), table in zip(template.stages, spread, table_of[template], strict=True):
                load = within = 0.0
                rings = [(dense, nodes, table.dense_bytes)] + (
                    [(expert, of_experts, table.expert_bytes)] if expert else []
                )
                for spread_of, held, size in rings:
                    for part in range(parts[stage.start], parts[stage.stop]):
                        sent = spread_of.part * size(cuts[part], cuts[part + 1])
                        load += self._ring_s(stage.pool, pools[part], held[part], sent)
                    within += self._inside_s(stage.pool, spread_of, size(stage.start, stage.stop))
                loads.append(load)
                inside.append(within)
            longest = max(longest, _fullest(template, loads, inside, own))
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
        run = [s for s in template.stages if s.pool == pool.name]
        own = sum(s.devices for s in run)
        before = sum(s.devices for s in template.stages[: stage + 1] if s.pool == pool.name)
        if own <= pool.devices_per_node:
            return pool.devices_per_node % own == 0
        return own % pool.devices_per_node == 0 and before % pool.devices_per_node != 0

    def _part(self, template: Template, stage: Stage, layout: Layout) -> float:
        """Of a node's link."""
        pool = self.fleet.pool(stage.pool)
        own = stage.devices if layout == "stages" else template.devices[stage.pool]
        # A stage that is wider than a node sends from all of its nodes.
        return max(min(1.0, own / pool.devices_per_node), stage.devices / pool.devices_per_node)

    def _share(self, template: Template, stage: Stage, count: int, layout: Layout) -> _Share:
        places = max(1, self.fleet.pool(stage.pool).devices_per_node // stage.devices)
        stages = sum(s.pool == stage.pool for s in template.stages)
        if layout == "stages":
            replicas = min(count, places)
            return _Share(replicas=replicas, stages=min(stages, max(1, places // replicas)))
        stages = min(stages, places)
        return _Share(replicas=min(count, max(1, places // stages)), stages=stages)

    def _spread(self, stage: Stage, share: _Share, count: int, width: int) -> _Spread:
        """``width``: devices over which one copy lies."""
        own = min(stage.devices, self.fleet.pool(stage.pool).devices_per_node)  # of the stage, on a node
        nodes = stage.devices // own
        return _Spread(
            inside=share.replicas * max(1, own // width),
            nodes=ceil(count / share.replicas) * max(1, nodes * own // max(own, width)),
            part=min(1.0, own / width),
            width=width,
        )

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

    def _inside_s(self, pool: str, spread: _Spread, size_bytes: float) -> float:
        """``size_bytes``: of one copy."""
        if spread.inside < 2 or not size_bytes:
            return 0.0
        wire = self._inside(self.fleet.pool(pool))
        if wire is None:
            return inf
        ring = 2 * (spread.inside - 1) / spread.inside * size_bytes / spread.width / wire.bandwidth_bytes_per_s
        return ring + 2 * (spread.inside - 1) * wire.latency_s

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
    """The longest time of a node, which holds some stages that follow each other in one pool."""
    longest = 0.0
    for first, stage in enumerate(template.stages):
        last = first
        while (
            last + 1 < len(loads)
            and template.stages[last + 1].pool == stage.pool
            and last + 1 - first < shares[first].stages
        ):
            last += 1
        longest = max(longest, sum(loads[first : last + 1]) + max(inside[first : last + 1]))
    return longest

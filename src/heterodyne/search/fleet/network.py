"""What goes between nodes: messages between stages, and gradients and parameters between the replicas of a layer.

The planner asks through `Network`, so that a better model of collectives can take the place of this one. Here a message takes
alpha + beta B (Hockney, 1994). The n devices that hold the same layer are a ring, laid out so that every byte enters a node once: once
round it takes (n - 1) / n bytes for each byte of the layer on every link (Patarasuk and Yuan, 2009), as in `predictor.network`. Once
round scatters sums of gradients or gathers parameters, twice round does both (all-reduce), along a tree where that waits less. All
links of a ring go at the pace of the slowest. What a node sends for all layers that it holds goes over its one link.

A stage too has copies of its parameters, where its devices share the sequence or the micro-batch, and of its experts, where it has more
devices than these can be spread over: they are in the rings like those of other pipelines.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations, pairwise
from math import ceil, inf, log2
from typing import NamedTuple, Protocol, get_args

from heterodyne.cluster.fleet import Fleet, Pool, Wire
from heterodyne.cost.layers import Widths
from heterodyne.search.fleet.plan import Layout, Stage, Template
from heterodyne.search.fleet.tables import Carried, Exchanged, Rates, Table

__all__ = ["Exchange", "Exchanges", "Network", "Rings"]

_WHAT: tuple[Exchanged, ...] = get_args(Exchanged)
_TIMES = len(_WHAT) + 2  # and the waits

Placed = Sequence[tuple[Template, int]]
"""Templates, and how many pipelines there are of each."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Exchange:
    """Seconds of the exchanges of a stage with the other replicas of its layers, each of all its layers.

    Args:
        reduced_s: gradients summed, all of them for all. ``scattered_s``: each device its part; ``updated_s``: changed parameters
            back to all.
        scattered_layers_s, gathered_layers_s: gradients scattered, parameters gathered, layer by layer.
        backward_s: what can hide an exchange: the shortest backward of a micro-batch of a stage that holds some of the layers.
    """

    reduced_s: float
    scattered_s: float
    updated_s: float
    scattered_layers_s: float
    gathered_layers_s: float
    backward_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Exchanges:
    """Of all stages of each template, and what it costs in usd to send everything once round."""

    of: Mapping[Template, Sequence[Exchange]]
    gradients_usd: float = 0.0
    updated_usd: float = 0.0
    parameters_usd: float = 0.0


class Network(Protocol):
    """Seconds and money of what goes between devices."""

    def joined(self, a: str, b: str) -> bool:
        """Whether anything is known of the way between two pools."""

    def send_s(self, template: Template, stage: int, size_bytes: float, layout: Layout) -> float:
        """From a stage of a pipeline to the next one."""

    def exchanges(self, placed: Placed, table_of: Mapping[Template, Sequence[Table]], layout: Layout) -> Exchanges:
        """Of gradients and parameters over the replicas of their layers. ``table_of``: for each template one table a stage."""

    def least_s_per_byte(self, pool: str, widths: Widths, replicas: int) -> Rates:
        """Of what a ring takes once round a stage on a pool among at least so many replicas: for a byte of a device, if all are in
        one node, and for a byte of the stage, if not. No exchange is shorter than both; infinite where it cannot be.
        """


@dataclass(frozen=True, kw_only=True, slots=True)
class _Share:
    """How many replicas of a stage are on a node, and how many places of a pipeline."""

    replicas: int
    stages: int


@dataclass(frozen=True)
class Rings:
    """The network of a fleet."""

    fleet: Fleet
    _wires: dict[tuple[str, str], Wire | None] = field(default_factory=dict, repr=False)

    def joined(self, a: str, b: str) -> bool:
        return self.wire(a, b) is not None or (a == b and self.fleet.pool(a).nodes == 1)

    def send_s(self, template: Template, stage: int, size_bytes: float, layout: Layout) -> float:
        """Over the wire inside a node, or over the part of a node's link that the pipelines on it leave to each other."""
        source, target = template.stages[stage], template.stages[stage + 1]
        pool = self.fleet.pool(source.pool)
        if source.pool == target.pool and self._same_node(template, stage, pool, layout):
            inside = self.inside(pool)
            # Parts of the sequence and of the micro-batch go side by side, as many as the stage with fewer of them has.
            own = size_bytes / min(source.widths.copies, target.widths.copies)
            return inf if inside is None else inside.latency_s + own / inside.bandwidth_bytes_per_s
        wire = self.wire(source.pool, target.pool)
        if wire is None:
            return inf
        part = min(self._part(template, source, layout), self._part(template, target, layout))
        return wire.latency_s + size_bytes / (wire.bandwidth_bytes_per_s * part)

    def exchanges(self, placed: Placed, table_of: Mapping[Template, Sequence[Table]], layout: Layout) -> Exchanges:
        shares = []
        for template, count in placed:
            places = Counter(home.pool for home in template.homes)
            shares.append([self._share(stage, places[stage.pool], count, layout) for stage in template.stages])
        rings = _Laid(self, placed, [table_of[template] for template, _ in placed], shares)
        of = {template: stages for (template, _), stages in zip(placed, rings.exchanges(), strict=True)}
        if not self.fleet.usd_per_byte:
            return Exchanges(of=of)
        gradients, updated, parameters = rings.usd()
        return Exchanges(of=of, gradients_usd=gradients, updated_usd=updated, parameters_usd=parameters)

    def least_s_per_byte(self, pool: str, widths: Widths, replicas: int) -> Rates:
        own = self.fleet.pool(pool)
        inside = self.inside(own)
        wires = [wire for other in self.fleet.pools if (wire := self.wire(pool, other.name)) is not None]
        together = replicas * widths.devices <= own.devices_per_node
        return (
            1 / inside.bandwidth_bytes_per_s if together and inside is not None else inf,
            1 / max(wire.bandwidth_bytes_per_s for wire in wires) if wires else inf,
        )

    def wire(self, a: str, b: str) -> Wire | None:
        """From a node of a pool to one of another (of the same: to another node); None where that is not known."""
        if (a, b) not in self._wires:
            self._wires[a, b] = self.fleet.wire(self.fleet.pool(a), self.fleet.pool(b))
        return self._wires[a, b]

    def inside(self, pool: Pool) -> Wire | None:
        """Where it is not known what joins the devices of a node, what joins nodes is taken."""
        return pool.inside or self.wire(pool.name, pool.name)

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
        # A stage that is wider than a node sends from all of its nodes.
        return max(min(1.0, own / pool.devices_per_node), stage.devices / pool.devices_per_node)

    def nodes_of(self, stage: Stage) -> int:
        """Over which the devices of one stage lie."""
        return max(1, stage.devices // self.fleet.pool(stage.pool).devices_per_node)

    def _share(self, stage: Stage, stages: int, count: int, layout: Layout) -> _Share:
        """``stages``: places of the pipeline in this pool."""
        places = max(1, self.fleet.pool(stage.pool).devices_per_node // stage.devices)
        if layout == "stages":
            replicas = min(count, places)
            return _Share(replicas=replicas, stages=min(stages, max(1, places // replicas)))
        stages = min(stages, places)
        return _Share(replicas=min(count, max(1, places // stages)), stages=stages)


class _Ring(NamedTuple):
    """Through the replicas of some layers: its nodes, seconds of a byte over its slowest link between them, and what the first byte
    waits for once round and along a tree.
    """

    nodes: int
    s_per_byte: float
    round_s: float
    tree_s: float


class _Ways(NamedTuple):
    """Of a stage: seconds of its gradients, updated and all parameters once round, of waiting once round and along a tree; its backward."""

    exchange_s: tuple[float, ...]
    backward_s: float


class _Laid:
    """The rings of the pipelines that stand beside each other: one for the layers between any two borders of stages."""

    def __init__(
        self,
        network: Rings,
        placed: Placed,
        tables: Sequence[Sequence[Table]],
        shares: Sequence[Sequence[_Share]],
    ) -> None:
        self._network, self._placed, self._tables, self._shares = network, placed, tables, shares
        self._replicas = sum(count for _, count in placed)
        self._cuts = sorted(
            {stage.start for t, _ in placed for stage in t.stages}
            | {stage.stop for t, _ in placed for stage in t.stages}
        )
        self._part = {start: number for number, start in enumerate(self._cuts)}
        self._pools: list[dict[str, tuple[int, int]]] = [{} for _ in self._cuts[1:]]
        for (template, count), own in zip(placed, shares, strict=True):
            for stage, share in zip(template.stages, own, strict=True):
                more = (ceil(count / share.replicas) * network.nodes_of(stage), count * stage.widths.copies)
                for part in self._parts(stage):
                    nodes, members = self._pools[part].get(stage.pool, (0, 0))
                    self._pools[part][stage.pool] = (nodes + more[0], members + more[1])
        known: dict[tuple[tuple[str, tuple[int, int]], ...], _Ring] = {}
        self._rings: list[_Ring] = []
        for pools in self._pools:
            key = tuple(pools.items())
            if key not in known:
                known[key] = self._ring(pools)
            self._rings.append(known[key])

    def exchanges(self) -> list[list[Exchange]]:
        """Of every stage of every template."""
        own = [
            self._ways(template, tables, shares)
            for (template, _), tables, shares in zip(self._placed, self._tables, self._shares, strict=True)
        ]
        if len(own) > 1:
            own = self._paced(own)
        return [
            [_exchange(way, stage.stop - stage.start) for way, stage in zip(ways, template.stages, strict=True)]
            for (template, _), ways in zip(self._placed, own, strict=True)
        ]

    def usd(self) -> tuple[float, float, float]:
        """Of gradients, updated and all parameters once round: a ring through several pools goes from each to the next one and back."""
        fleet = self._network.fleet
        (template, _), tables = self._placed[0], self._tables[0]
        found = dict.fromkeys(_WHAT, 0.0)
        for stage, table in zip(template.stages, tables, strict=True):
            for part in self._parts(stage):
                row = sorted((fleet.pool(name) for name in self._pools[part]), key=lambda pool: pool.place)
                if len(row) > 1:
                    around = zip(row, [*row[1:], row[0]], strict=True)
                    price = sum(fleet.traffic_usd_per_byte(a, b) for a, b in around)
                    for what in _WHAT:
                        sent = table.carried(what, self._cuts[part], self._cuts[part + 1], self._replicas)
                        found[what] += price * (sent.dense + sent.experts)
        return found["gradients"], found["updated"], found["parameters"]

    def _parts(self, stage: Stage) -> range:
        return range(self._part[stage.start], self._part[stage.stop])

    def _ring(self, pools: Mapping[str, tuple[int, int]]) -> _Ring:
        network, fleet = self._network, self._network.fleet
        nodes = sum(count for count, _ in pools.values())
        wires = []
        unknown = False
        round_s = tree_s = 0.0
        for name, (count, members) in pools.items():
            inside = network.inside(fleet.pool(name))
            if inside is not None and members > count:
                round_s += (members - count) * inside.latency_s
                tree_s = max(tree_s, ceil(log2(ceil(members / count))) * inside.latency_s)
            if count > 1:
                wire = network.wire(name, name)
                unknown |= wire is None
                if wire is not None:
                    wires.append(wire)
                    round_s += (count - 1) * wire.latency_s
        for a, b in combinations(pools, 2):
            wire = network.wire(a, b)
            unknown |= wire is None
            if wire is not None:
                wires.append(wire)
        if len(pools) > 1 and not unknown:
            names = list(pools)
            for a, b in pairwise(names):
                wire = network.wire(a, b)
                round_s += 0.0 if wire is None else wire.latency_s
        if nodes > 1 and wires:
            tree_s += ceil(log2(nodes)) * max(wire.latency_s for wire in wires)
        slowest = min((wire.bandwidth_bytes_per_s for wire in wires), default=inf)
        return _Ring(nodes=nodes, s_per_byte=inf if unknown else 1 / slowest, round_s=round_s, tree_s=tree_s)

    def _ways(self, template: Template, tables: Sequence[Table], shares: Sequence[_Share]) -> list[_Ways]:
        between: list[list[float]] = []
        found: list[list[float]] = []
        waits: list[tuple[float, float]] = []
        for stage, table, share in zip(template.stages, tables, shares, strict=True):
            rings = self._rings[self._part[stage.start] : self._part[stage.stop]]
            sent = [table.carried(what, stage.start, stage.stop, self._replicas) for what in _WHAT]
            between.append(self._between_s(stage, table, sent, rings))
            found.append(self._inside_s(stage, sent, share))
            alone = self._replicas * stage.widths.copies < 2
            waits.append((0.0, 0.0) if alone else (max(r.round_s for r in rings), max(r.tree_s for r in rings)))
        for first, last in _on_a_node(template, shares):
            for what in range(len(_WHAT)):
                load = sum(between[number][what] for number in range(first, last))
                for number in range(first, last):
                    found[number][what] = max(found[number][what], load)
        return [
            _Ways((*own, *wait), table.backward_s(stage.start, stage.stop, stage.recompute))
            for stage, table, own, wait in zip(template.stages, tables, found, waits, strict=True)
        ]

    def _between_s(self, stage: Stage, table: Table, sent: Sequence[Carried], rings: Sequence[_Ring]) -> list[float]:
        """What a node sends of each for a stage."""
        rates = [ring.s_per_byte if ring.nodes > 1 else 0.0 for ring in rings]
        experts = self._experts(stage, table)
        if len(set(rates)) == 1:
            return [_seconds(rates[0], own.dense + experts * own.experts) for own in sent]
        total = [0.0] * len(_WHAT)
        for part, rate in zip(self._parts(stage), rates, strict=True):
            if rate > 0:
                for number, what in enumerate(_WHAT):
                    own = table.carried(what, self._cuts[part], self._cuts[part + 1], self._replicas)
                    total[number] += _seconds(rate, own.dense + experts * own.experts)
        return total

    def _experts(self, stage: Stage, table: Table) -> float:
        """The part of a set of them that a node sends: it may lie over several, each of which sends those that it has."""
        width = table.expert_width
        return min(1.0, stage.devices / self._network.nodes_of(stage) / width) if width else 0.0

    def _inside_s(self, stage: Stage, sent: Sequence[Carried], share: _Share) -> list[float]:
        if share.replicas * stage.widths.copies < 2:
            return [0.0] * len(sent)
        wire = self._network.inside(self._network.fleet.pool(stage.pool))
        rate = inf if wire is None else 1 / wire.bandwidth_bytes_per_s
        return [_seconds(rate, own.device) for own in sent]

    def _paced(self, own: Sequence[Sequence[_Ways]]) -> list[list[_Ways]]:
        """All replicas of a layer are done with it at the same time, so the slowest decides, and the shortest backward hides."""
        longest = [[0.0] * _TIMES for _ in self._rings]
        backward = [inf for _ in self._rings]
        for (template, _), ways in zip(self._placed, own, strict=True):
            for stage, way in zip(template.stages, ways, strict=True):
                for part in self._parts(stage):
                    longest[part] = list(map(max, longest[part], way.exchange_s))
                    backward[part] = min(backward[part], way.backward_s)
        return [
            [
                _Ways(
                    tuple(max(times) for times in zip(*(longest[part] for part in self._parts(stage)), strict=True)),
                    min(backward[part] for part in self._parts(stage)),
                )
                for stage in template.stages
            ]
            for template, _ in self._placed
        ]


def _exchange(way: _Ways, layers: int) -> Exchange:
    gradients_s, updated_s, parameters_s, round_s, tree_s = way.exchange_s
    return Exchange(
        reduced_s=2 * (gradients_s + min(round_s, tree_s)),
        scattered_s=gradients_s + round_s,
        updated_s=updated_s + round_s,
        scattered_layers_s=gradients_s + layers * round_s,
        gathered_layers_s=parameters_s + layers * round_s,
        backward_s=way.backward_s,
    )


def _seconds(s_per_byte: float, size_bytes: float) -> float:
    return s_per_byte * size_bytes if size_bytes > 0 else 0.0


def _on_a_node(template: Template, shares: Sequence[_Share]) -> Iterator[tuple[int, int]]:
    """Stages [first, last) on places that follow each other in one pool and may share the link of a node."""
    stages = template.stages
    for first, stage in enumerate(stages):
        last = first + 1
        end = first + template.places - first % template.places
        while last < end and stages[last].pool == stage.pool and last - first < shares[first].stages:
            last += 1
        yield first, last

"""Gradient and parameter sync of pipelines placed on nodes: one ring through the replicas of the layers between any two stage boundaries.

A search asks for every promising mix, so all stages of a pipeline are computed at once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise
from math import ceil, inf, log2
from typing import NamedTuple

import numpy as np

from heterodyne.predictor.software import Software
from heterodyne.search.fleet.arrays import Floats, Ints
from heterodyne.search.fleet.fleet_wires import Wires
from heterodyne.search.fleet.plan import Layout, Template, TemplateStage
from heterodyne.search.fleet.stage_tables import StageSums
from heterodyne.search.fleet.tables import EXCHANGED, CommVolume

__all__ = ["Exchange", "Exchanges", "GradientSync", "Line", "Placed", "RingCost"]

Placed = Sequence[tuple[Template, int]]
"""Templates, and how many pipelines there are of each."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Exchange:
    """Seconds of the collectives of each stage with the other replicas of its layers. Shape [stages].

    Args:
        reduced_s: all-reduce of gradients. ``scattered_s``: reduce-scatter of gradients; ``updated_s``: all-gather of updated parameters.
        scattered_layers_s, gathered_layers_s: reduce-scatter of gradients and all-gather of parameters, layer by layer.
        backward_s: what can hide a collective: the shortest backward of a micro-batch of a stage that holds some of the layers.
    """

    reduced_s: Floats
    scattered_s: Floats
    updated_s: Floats
    scattered_layers_s: Floats
    gathered_layers_s: Floats
    backward_s: Floats


@dataclass(frozen=True, kw_only=True, slots=True)
class Exchanges:
    """Collectives of each template, and the price in usd of one ring pass of each kind."""

    of: Mapping[Template, Exchange]
    gradients_usd: float = 0.0
    updated_usd: float = 0.0
    parameters_usd: float = 0.0


_Members = tuple[str, int, int]
"""Of a ring: a pool, the nodes and the devices in it."""


class RingCost(NamedTuple):
    """Cost of a ring through the replicas of some layers: seconds per byte of its slowest link between nodes (0 inside one node), and
    latency of one ring pass, of a tree, and of a message from each member in turn to all others.
    """

    s_per_byte: float
    round_s: float
    tree_s: float
    turns_s: float


class _Share(NamedTuple):
    """The number of replicas of a stage on one node, and of ranks of one pipeline."""

    replicas: int
    stages: int


class _Ways(NamedTuple):
    """Of each stage: seconds of one ring pass of all that is `EXCHANGED`, latencies as of a `RingCost`; its backward. Shapes [6, stages]
    and [stages].
    """

    exchange_s: Floats
    backward_s: Floats


class Line:
    """``count`` replicas of one template in a layout; independent of the other templates."""

    def __init__(self, wires: Wires, sums: StageSums, count: int, layout: Layout) -> None:
        self.sums, self.count = sums, count
        own = [sums.template.stages[first] for first in sums.own]
        places = Counter(home.pool for home in sums.template.homes)
        shares = [_share(wires, stage, places[stage.pool], count, layout) for stage in own]
        self.members: list[_Members] = [
            (stage.pool, ceil(count / share.replicas) * _nodes_of(wires, stage), count * stage.widths.copies)
            for stage, share in zip(own, shares, strict=True)
        ]
        """Of a ring through each of `StageSums.own`."""
        figures = [
            (
                _inside_rate(wires, stage) if share.replicas * stage.widths.copies > 1 else 0.0,
                _experts(wires, stage, sums.tables[first].expert_width),
                stage.widths.copies,
                share.stages,
            )
            for first, stage, share in zip(sums.own, own, shares, strict=True)
        ]
        self._inside, self.experts, self._copies, on_node = np.array(figures).T[:, sums.alike]
        on_node = np.minimum(on_node, sums.in_row)
        self._further = [np.flatnonzero(on_node > further) for further in range(1, int(on_node.max()))]
        """Stages that have so many others behind them on the same node."""

    def ways(self, between: Floats, waits: Floats, replicas: int) -> _Ways:
        """As if no other replicas of its layers were slower.

        Args:
            between: bytes that a node sends of each stage. Shape [3, stages].
            waits: latencies of a `RingCost`. Shape [3, stages].
        """
        device, _, _ = self.sums.sent.carried(replicas)
        load = between
        if self._further:
            load = between.copy()
            for further, at in enumerate(self._further, 1):
                load[:, at] += between[:, at + further]
        found = np.maximum(_seconds(self._inside, device), load)
        for further, at in enumerate(self._further, 1):
            found[:, at + further] = np.maximum(found[:, at + further], load[:, at])
        if replicas == 1:
            waits = np.where(self._copies > 1, waits, 0.0)
        return _Ways(np.concatenate([found, waits]), self.sums.backward_s)

    def carried(self, replicas: int) -> Floats:
        """Bytes that a node sends of each stage in one ring pass. Shape [3, stages]."""
        return _leaving(self.sums.sent, self.experts, replicas)


class _Parts:
    """The layers between any two stage boundaries of all pipelines, mapped to the stages of one template."""

    def __init__(self, line: Line, cuts: Ints) -> None:
        self.line, self.cuts = line, cuts
        self.first = np.searchsorted(cuts, line.sums.starts)
        """Of each stage, its first part."""
        self.stage = np.repeat(np.arange(len(self.first)), np.diff(self.first, append=len(cuts) - 1))
        """Of each part."""

    def between_s(self, rates: Floats, replicas: int) -> Floats:
        """What a node sends of each for a stage. ``rates``: of each part."""
        slowest, fastest = (own.reduceat(rates, self.first) for own in (np.maximum, np.minimum))
        found = _seconds(slowest, self.line.carried(replicas))
        for number in np.flatnonzero(slowest != fastest).tolist():
            parts = np.flatnonzero(self.stage == number)
            sent = self.line.sums.tables[number].sent(self.cuts[parts], self.cuts[parts + 1])
            leaving = _leaving(sent, self.line.experts[number], replicas)
            found[:, number] = _seconds(rates[parts], leaving).sum(axis=1)
        return found

    def waits(self, rings: Floats) -> Floats:
        found: Floats = np.maximum.reduceat(rings, self.first, axis=1)
        return found

    def paced(self, longest: Floats, backward: Floats) -> _Ways:
        """With what its stages wait for of each part."""
        return _Ways(
            np.maximum.reduceat(longest, self.first, axis=1),
            np.minimum.reduceat(backward, self.first),
        )


class GradientSync:
    """Sync of a mix of pipelines. ``known``: rings through the same members, shared between mixes."""

    def __init__(self, wires: Wires, lines: Sequence[Line], known: dict[object, RingCost], software: Software) -> None:
        self._wires, self._lines, self._software = wires, lines, software
        self._replicas = sum(line.count for line in lines)
        first, *others = (line.sums.borders for line in lines)
        self._cuts = np.unique(np.concatenate([first, *others])) if others else first
        self._parts = [_Parts(line, self._cuts) for line in lines] if others else []
        kinds = [parts.line.sums.alike[parts.stage] for parts in self._parts] or [lines[0].sums.alike]
        self._members: list[tuple[int, ...]] = list(zip(*(own.tolist() for own in kinds), strict=True))
        """Of each part, which of `StageSums.own` have it."""
        rings: dict[tuple[int, ...], RingCost] = {}
        for numbers in dict.fromkeys(self._members):
            pools = self._pools(numbers)
            key = tuple(pools.items())
            if key not in known:
                known[key] = _ring(wires, pools)
            rings[numbers] = known[key]
        self._rings = np.array([rings[numbers] for numbers in self._members]).T

    def exchanges(self) -> list[Exchange]:
        """Of each template."""
        rates, waits = self._rings[0], self._rings[1:]
        replicas = self._replicas
        if not self._parts:
            (line,) = self._lines
            own = [line.ways(_seconds(rates, line.carried(replicas)), waits, replicas)]
        else:
            own = [
                parts.line.ways(parts.between_s(rates, replicas), parts.waits(waits), replicas) for parts in self._parts
            ]
            # All replicas of a layer are done with it at the same time, so the slowest decides, and the shortest backward hides.
            spread = list(zip(own, self._parts, strict=True))
            longest = np.maximum.reduce([ways.exchange_s[:, parts.stage] for ways, parts in spread])
            backward = np.minimum.reduce([ways.backward_s[parts.stage] for ways, parts in spread])
            own = [parts.paced(longest, backward) for parts in self._parts]
        return [
            _exchange(ways, line.sums.stops - line.sums.starts, self._software)
            for line, ways in zip(self._lines, own, strict=True)
        ]

    def usd(self) -> tuple[float, float, float]:
        """Price of one ring pass of gradients, updated and all parameters; a ring through several pools passes from each to the next and
        back.
        """
        fleet, first = self._wires.fleet, self._lines[0].sums
        stages = np.searchsorted(first.starts, self._cuts[:-1], side="right") - 1
        found = np.zeros(len(EXCHANGED))
        for part, (stage, numbers) in enumerate(zip(stages.tolist(), self._members, strict=True)):
            row = sorted(map(fleet.pool, self._pools(numbers)), key=lambda pool: pool.place)
            if len(row) > 1:
                around = zip(row, [*row[1:], row[0]], strict=True)
                price = sum(fleet.traffic_usd_per_byte(a, b) for a, b in around)
                sent = first.tables[stage].sent(self._cuts[part : part + 1], self._cuts[part + 1 : part + 2])
                found += price * _leaving(sent, 1.0, self._replicas)[:, 0]
        gradients, updated, parameters = found.tolist()
        return gradients, updated, parameters

    def _pools(self, numbers: Sequence[int]) -> dict[str, tuple[int, int]]:
        """Nodes and devices of a ring in each pool, through stages of some kind of each line."""
        pools: dict[str, tuple[int, int]] = {}
        for line, number in zip(self._lines, numbers, strict=True):
            pool, nodes, members = line.members[number]
            before = pools.get(pool, (0, 0))
            pools[pool] = before[0] + nodes, before[1] + members
        return pools


def _ring(wires: Wires, pools: Mapping[str, tuple[int, int]]) -> RingCost:
    fleet = wires.fleet
    nodes = sum(count for count, _ in pools.values())
    links = []
    unknown = False
    round_s = tree_s = chain_s = 0.0
    for name, (count, members) in pools.items():
        inside = wires.inside(fleet.pool(name))
        if inside is not None and members > count:
            round_s += (members - count) * inside.latency_s
            chain_s = max(chain_s, (ceil(members / count) - 1) * inside.latency_s)
            tree_s = max(tree_s, ceil(log2(ceil(members / count))) * inside.latency_s)
        if count > 1:
            wire = wires.between(name, name)
            unknown |= wire is None
            if wire is not None:
                links.append(wire)
                round_s += (count - 1) * wire.latency_s
    for a, b in combinations(pools, 2):
        wire = wires.between(a, b)
        unknown |= wire is None
        if wire is not None:
            links.append(wire)
    if len(pools) > 1 and not unknown:
        names = list(pools)
        for a, b in pairwise(names):
            wire = wires.between(a, b)
            round_s += 0.0 if wire is None else wire.latency_s
    if nodes > 1 and links:
        tree_s += ceil(log2(nodes)) * max(wire.latency_s for wire in links)
        chain_s += (nodes - 1) * max(wire.latency_s for wire in links)
    turns_s = sum(members for _, members in pools.values()) * chain_s
    if nodes < 2:
        return RingCost(0.0, round_s, tree_s, turns_s)
    slowest = min((wire.bandwidth_bytes_per_s for wire in links), default=inf)
    return RingCost(inf if unknown else 1 / slowest, round_s, tree_s, turns_s)


def _share(wires: Wires, stage: TemplateStage, stages: int, count: int, layout: Layout) -> _Share:
    """``stages``: places of the pipeline in this pool."""
    places = max(1, wires.fleet.pool(stage.pool).devices_per_node // stage.devices)
    if layout == "stages":
        replicas = min(count, places)
        return _Share(replicas=replicas, stages=min(stages, max(1, places // replicas)))
    stages = min(stages, places)
    return _Share(replicas=min(count, max(1, places // stages)), stages=stages)


def _leaving(sent: CommVolume, experts: Floats | float, replicas: int) -> Floats:
    """Bytes once round, of the copy and a part of each set of experts. Shape [3, stages]."""
    _, dense, sets = sent.carried(replicas)
    found: Floats = dense + experts * sets
    return found


def _inside_rate(wires: Wires, stage: TemplateStage) -> float:
    """Seconds of a byte of a device."""
    wire = wires.inside(wires.fleet.pool(stage.pool))
    return inf if wire is None else 1 / wire.bandwidth_bytes_per_s


def _nodes_of(wires: Wires, stage: TemplateStage) -> int:
    """Over which the devices of one stage lie."""
    return max(1, stage.devices // wires.fleet.pool(stage.pool).devices_per_node)


def _experts(wires: Wires, stage: TemplateStage, width: int) -> float:
    """The part of a set of them that a node sends: it may lie over several, each of which sends those that it has."""
    return min(1.0, stage.devices / _nodes_of(wires, stage) / width) if width else 0.0


def _exchange(ways: _Ways, layers: Ints, software: Software) -> Exchange:
    gradients_s, updated_s, parameters_s, round_s, tree_s, turns_s = ways.exchange_s
    messages = software.gathers * layers
    return Exchange(
        reduced_s=2 * (gradients_s + np.minimum(round_s, tree_s)),
        scattered_s=gradients_s + round_s,
        updated_s=updated_s + (turns_s if software.broadcasts else round_s),
        scattered_layers_s=gradients_s + messages * round_s,
        gathered_layers_s=parameters_s + messages * round_s,
        backward_s=ways.backward_s,
    )


def _seconds(s_per_byte: Floats, size_bytes: Floats) -> Floats:
    """Nothing takes no time, even over a wire that is not known."""
    found: Floats = np.multiply(s_per_byte, size_bytes, out=np.zeros(size_bytes.shape), where=size_bytes > 0)
    return found

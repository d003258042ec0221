"""Pipelines laid out beside each other on nodes, and the rings through the replicas of their layers: one for the layers between any two
borders of stages.

A search asks this of every mix that may be good, so it is worked out for all stages of a pipeline at once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import combinations, pairwise
from math import ceil, inf, log2
from typing import NamedTuple

import numpy as np

from heterodyne.search.fleet.network import Exchange
from heterodyne.search.fleet.plan import Layout, Stage
from heterodyne.search.fleet.stage_sums import StageSums
from heterodyne.search.fleet.tables import EXCHANGED, Floats, Ints
from heterodyne.search.fleet.wires import Wires

__all__ = ["Laid", "Ring"]

_Members = tuple[str, int, int]
"""Of a ring: a pool, the nodes and the devices in it."""


class Ring(NamedTuple):
    """Through the replicas of some layers: seconds of a byte over its slowest link between nodes, 0 where it is in one, and what the first
    byte waits for once round and along a tree.
    """

    s_per_byte: float
    round_s: float
    tree_s: float


class _Share(NamedTuple):
    """How many replicas of a stage are on a node, and how many places of a pipeline."""

    replicas: int
    stages: int


class _Ways(NamedTuple):
    """Of each stage: seconds of all that is `EXCHANGED` once round, of waiting once round and along a tree; its backward.

    Shapes [5, stages] and [stages].
    """

    exchange_s: Floats
    backward_s: Floats


class _Line:
    """One kind of pipeline among those that stand beside each other.

    Args:
        cuts: borders of the stages of all pipelines; layers between two are a part.
    """

    def __init__(self, wires: Wires, sums: StageSums, count: int, layout: Layout, cuts: Ints) -> None:
        self.sums, self._wires = sums, wires
        own = [sums.template.stages[first] for first in sums.own]
        places = Counter(home.pool for home in sums.template.homes)
        shares = [_share(wires, stage, places[stage.pool], count, layout) for stage in own]
        self.members: list[_Members] = [
            (stage.pool, ceil(count / share.replicas) * wires.nodes_of(stage), count * stage.widths.copies)
            for stage, share in zip(own, shares, strict=True)
        ]
        self.copies = [stage.widths.copies for stage in own]
        self._inside = [
            _inside_rate(wires, stage) if share.replicas * stage.widths.copies > 1 else 0.0
            for stage, share in zip(own, shares, strict=True)
        ]
        self._experts = [
            _experts(wires, stage, sums.tables[first].expert_width) for stage, first in zip(own, sums.own, strict=True)
        ]
        self._on_node = [share.stages for share in shares]
        self._cuts = cuts
        self.first = np.searchsorted(cuts, sums.starts)
        """Of each stage, its first part."""
        self.stage = np.repeat(np.arange(len(sums.starts)), np.diff([*self.first, len(cuts) - 1]))
        """Of each part."""

    def of_stages(self, values: Sequence[float]) -> Floats:
        """One of each kind of stage becomes one of each stage."""
        return np.array(values)[self.sums.alike]

    def ways(self, rings: Floats, replicas: int) -> _Ways:
        """Alone, as if other replicas of its layers were no slower. ``rings``: of each part, shape [3, parts] (see `Ring`)."""
        sums = self.sums
        device, dense, experts = sums.sent.carried(replicas)
        between = self._between_s(rings[0], dense + self.of_stages(self._experts) * experts, replicas)
        found = _seconds(self.of_stages(self._inside), device)
        stages = len(sums.starts)
        on_node = np.minimum(self.of_stages(self._on_node), sums.in_row)
        load = between.copy()
        for further in range(1, int(on_node.max())):
            at = np.flatnonzero(on_node > further)
            load[:, at] += between[:, at + further]
        for further in range(int(on_node.max())):
            at = np.flatnonzero(on_node > further)
            found[:, at + further] = np.maximum(found[:, at + further], load[:, at])
        waits = np.maximum.reduceat(rings[1:], self.first, axis=1) if len(self.stage) > stages else rings[1:]
        alone = self.of_stages([replicas * copies < 2 for copies in self.copies])
        return _Ways(np.concatenate([found, np.where(alone, 0.0, waits)]), sums.backward_s)

    def _between_s(self, rates: Floats, sent: Floats, replicas: int) -> Floats:
        """What a node sends of each for a stage. ``rates``: of each part; ``sent``: of each stage."""
        if len(self.stage) == len(self.sums.starts):
            return _seconds(rates, sent)
        slowest, fastest = (own.reduceat(rates, self.first) for own in (np.maximum, np.minimum))
        found = _seconds(slowest, sent)
        for number in np.flatnonzero(slowest != fastest).tolist():
            parts = np.flatnonzero(self.stage == number)
            table = self.sums.tables[number]
            _, dense, experts = table.sent(self._cuts[parts], self._cuts[parts + 1]).carried(replicas)
            own = dense + self._experts[self.sums.alike[number]] * experts
            found[:, number] = _seconds(rates[parts], own).sum(axis=1)
        return found

    def paced(self, longest: Floats, backward: Floats) -> _Ways:
        """With what its stages wait for of each part."""
        return _Ways(
            np.maximum.reduceat(longest, self.first, axis=1),
            np.minimum.reduceat(backward, self.first),
        )

    def sent(self, part: int, replicas: int) -> Floats:
        """Of all that is `EXCHANGED`, of some layers once round: by all copies."""
        table = self.sums.tables[int(self.stage[part])]
        _, dense, experts = table.sent(self._cuts[part : part + 1], self._cuts[part + 1 : part + 2]).carried(replicas)
        found: Floats = (dense + experts)[:, 0]
        return found


class Laid:
    """The rings of pipelines that stand beside each other. ``known``: rings through the same members, kept from one mix to the next."""

    def __init__(
        self, wires: Wires, placed: Sequence[tuple[StageSums, int]], layout: Layout, known: dict[object, Ring]
    ) -> None:
        self._wires = wires
        self._replicas = sum(count for _, count in placed)
        first, *others = (np.append(sums.starts, sums.stops[-1:]) for sums, _ in placed)
        cuts = np.unique(np.concatenate([first, *others])) if others else first
        self._lines = [_Line(wires, sums, count, layout, cuts) for sums, count in placed]
        kinds = [np.array(line.sums.alike)[line.stage].tolist() for line in self._lines]
        self._members = [tuple(numbers) for numbers in zip(*kinds, strict=True)]
        rings: dict[tuple[int, ...], Ring] = {}
        for numbers in self._members:
            if numbers not in rings:
                key = tuple(self._pools(numbers).items())
                if key not in known:
                    known[key] = _ring(wires, self._pools(numbers))
                rings[numbers] = known[key]
        self._rings = np.array([rings[numbers] for numbers in self._members]).T

    def exchanges(self) -> list[Exchange]:
        """Of each kind of pipeline."""
        own = [line.ways(self._rings, self._replicas) for line in self._lines]
        if len(own) > 1:
            # All replicas of a layer are done with it at the same time, so the slowest decides, and the shortest backward hides.
            longest = np.maximum.reduce(
                [ways.exchange_s[:, line.stage] for line, ways in zip(self._lines, own, strict=True)]
            )
            backward = np.minimum.reduce(
                [ways.backward_s[line.stage] for line, ways in zip(self._lines, own, strict=True)]
            )
            own = [line.paced(longest, backward) for line in self._lines]
        return [
            _exchange(ways, line.sums.stops - line.sums.starts) for line, ways in zip(self._lines, own, strict=True)
        ]

    def usd(self) -> tuple[float, float, float]:
        """Of gradients, updated and all parameters once round: a ring through several pools goes from each to the next one and back."""
        fleet = self._wires.fleet
        found = np.zeros(len(EXCHANGED))
        for part, numbers in enumerate(self._members):
            row = sorted(map(fleet.pool, self._pools(numbers)), key=lambda pool: pool.place)
            if len(row) > 1:
                around = zip(row, [*row[1:], row[0]], strict=True)
                price = sum(fleet.traffic_usd_per_byte(a, b) for a, b in around)
                found += price * self._lines[0].sent(part, self._replicas)
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


def _ring(wires: Wires, pools: Mapping[str, tuple[int, int]]) -> Ring:
    fleet = wires.fleet
    nodes = sum(count for count, _ in pools.values())
    links = []
    unknown = False
    round_s = tree_s = 0.0
    for name, (count, members) in pools.items():
        inside = wires.inside(fleet.pool(name))
        if inside is not None and members > count:
            round_s += (members - count) * inside.latency_s
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
    if nodes < 2:
        return Ring(0.0, round_s, tree_s)
    slowest = min((wire.bandwidth_bytes_per_s for wire in links), default=inf)
    return Ring(inf if unknown else 1 / slowest, round_s, tree_s)


def _share(wires: Wires, stage: Stage, stages: int, count: int, layout: Layout) -> _Share:
    """``stages``: places of the pipeline in this pool."""
    places = max(1, wires.fleet.pool(stage.pool).devices_per_node // stage.devices)
    if layout == "stages":
        replicas = min(count, places)
        return _Share(replicas=replicas, stages=min(stages, max(1, places // replicas)))
    stages = min(stages, places)
    return _Share(replicas=min(count, max(1, places // stages)), stages=stages)


def _inside_rate(wires: Wires, stage: Stage) -> float:
    """Seconds of a byte of a device."""
    wire = wires.inside(wires.fleet.pool(stage.pool))
    return inf if wire is None else 1 / wire.bandwidth_bytes_per_s


def _experts(wires: Wires, stage: Stage, width: int) -> float:
    """The part of a set of them that a node sends: it may lie over several, each of which sends those that it has."""
    return min(1.0, stage.devices / wires.nodes_of(stage) / width) if width else 0.0


def _exchange(ways: _Ways, layers: Ints) -> Exchange:
    gradients_s, updated_s, parameters_s, round_s, tree_s = ways.exchange_s
    return Exchange(
        reduced_s=2 * (gradients_s + np.minimum(round_s, tree_s)),
        scattered_s=gradients_s + round_s,
        updated_s=updated_s + round_s,
        scattered_layers_s=gradients_s + layers * round_s,
        gathered_layers_s=parameters_s + layers * round_s,
        backward_s=ways.backward_s,
    )


def _seconds(s_per_byte: Floats, size_bytes: Floats) -> Floats:
    """Nothing takes no time, even over a wire that is not known."""
    found: Floats = np.multiply(s_per_byte, size_bytes, out=np.zeros(size_bytes.shape), where=size_bytes > 0)
    return found

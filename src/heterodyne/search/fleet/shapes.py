"""Shapes of pipelines: rows of stages on kinds of devices, each with the cut whose slowest stage is as fast as can be.

A dynamic program from the last layer to the first. The last stage of 1F1B holds one micro-batch, the one before it two, so a row
that is grown from its end knows what each new stage holds, and all rows that end alike share their work. With T[s][l] the least
longest stage of a row s over the layers from l on: T[k + s][l] = min over e of max(cost of stage [l, e) on kind k, T[s][e]), which is exact
(the min-max partition of AutoPipe and PipeDream, with a memory limit for each stage). Alike devices are one kind, so the number of rows
grows with kinds and stages and not with devices.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from math import ceil

import numpy as np
from numpy.typing import NDArray

from heterodyne.cluster.fleet import Fleet
from heterodyne.search.fleet.arrays import Floats, Ints
from heterodyne.search.fleet.kept import Kept
from heterodyne.search.fleet.kinds import Kind, chosen_of, kinds_of
from heterodyne.search.fleet.network import Network
from heterodyne.search.fleet.plan import Template
from heterodyne.search.fleet.space import Space
from heterodyne.search.fleet.tables import Tables

__all__ = ["Shapes", "Sharing", "shapes"]

_FEW = (2, 4, 16)
_ALL = slice(None)
_CELLS = 1 << 16  # of an array that is worked on at once
_COSTS_KEPT = 128  # arrays of layers by layers, while rows are made one after the other


@dataclass(frozen=True, kw_only=True)
class Sharing:
    """How state is shared out: in as many parts as there are pipelines, at one of some levels; each stage at whichever is best for it.

    With several levels that is a relaxation: a plan has one for all stages.

    Args:
        least: pipelines that there are at least, for what they exchange beside passes; None: two, where a stage has no copies.
        network: tells the least seconds of that; None: it takes none.
    """

    replicas: int = 1
    zero: tuple[int, ...] = (0,)
    least: int | None = None
    network: Network | None = None

    def seconds(self, kind: Kind, held: int, recompute: bool, starts: slice = _ALL, stops: slice = _ALL) -> Floats:
        """See `Table.seconds`."""
        least = (2 if kind.widths.copies == 1 else 1) if self.least is None else self.least
        rates = (0.0, 0.0)
        if self.network is not None and max(self.zero) > 1:
            rates = self.network.least_s_per_byte(kind.name, kind.widths, least)
        ways = [
            kind.table.seconds(
                held=held,
                memory_bytes=kind.memory_bytes,
                recompute=recompute,
                replicas=self.replicas,
                zero=zero,
                exchange=(least, rates),
                starts=starts,
                stops=stops,
            )
            for zero in self.zero
        ]
        found: Floats = ways[0] if len(ways) == 1 else np.minimum.reduce(ways)
        return found

    def fits(self, kind: Kind, start: int, stop: int, held: int) -> bool:
        """Whether a stage does at some level without recompute."""
        return any(
            kind.table.memory(start, stop, recompute=False, held=held, replicas=self.replicas, zero=zero).total
            <= kind.memory_bytes
            for zero in self.zero
        )


@dataclass(frozen=True, kw_only=True)
class Shapes:
    """Rows of stages that fit, for one micro-batch size.

    Args:
        longest_s, total_s: of each row, of one micro-batch: its slowest stage, and all its stages. Shape [rows].
        devices: Shape [rows, pools].
    """

    kinds: tuple[Kind, ...]
    micro_batch: int
    held_at_most: int
    sharing: Sharing
    recompute: bool
    longest_s: Floats
    total_s: Floats
    devices: Ints
    _node: Ints
    _parent: Ints
    _kind: Ints

    def __len__(self) -> int:
        return len(self.longest_s)

    def of_pool(self, pool: int) -> Shapes | None:
        """The rows over one pool only; None if there is none."""
        others = np.delete(self.devices, pool, axis=1)
        own = np.flatnonzero(others.sum(axis=1) == 0)
        if not len(own):
            return None
        return replace(
            self,
            longest_s=self.longest_s[own],
            total_s=self.total_s[own],
            devices=self.devices[own],
            _node=self._node[own],
        )

    def templates(self, rows: Iterable[int]) -> list[list[Template]]:
        """Of each of some rows, with the cut whose slowest stage is fastest, and with those that are best for few micro-batches.

        Stage i cannot begin before the ones before it have had the first micro-batch, nor end after they have begun the last
        backward, so n micro-batches take at least H[i] = max(n cost[i], cost[i] + H[i + 1]), which the cut makes least.
        """
        known: Kept[tuple[int, int, int], Floats] = Kept(_COSTS_KEPT)
        found = []
        for row in rows:
            chain = self._chain(row)
            # Every stage has a layer at least, so the first one of a stage is one of so many.
            first = len(self.kinds[0].table.costs) - len(chain) + 1
            costs = [
                known.get((kind, place, len(chain)), partial(self._cost, kind, place, len(chain), first))
                for place, kind in enumerate(chain)
            ]
            counts = [count for count in _FEW if count <= self.held_at_most and len(chain) > 1]
            cuts = dict.fromkeys(_least(costs, count) for count in (None, *counts))
            found.append([self._template([self.kinds[kind] for kind in chain], points) for points in cuts])
        return found

    def _cost(self, kind: int, place: int, places: int, first: int) -> Floats:
        """Seconds of a stage from each of the layers that it may begin with to each that it may end before."""
        return self.sharing.seconds(
            self.kinds[kind],
            min(places - place, self.held_at_most),
            self.recompute,
            slice(place, place + first),
            slice(place + 1, place + 1 + first),
        )

    def _chain(self, row: int) -> list[int]:
        """The kinds of its stages."""
        chain = []
        node = int(self._node[row])
        while node >= 0:
            chain.append(int(self._kind[node]))
            node = int(self._parent[node])
        return chain

    def _template(self, chain: Sequence[Kind], points: Sequence[int]) -> Template:
        stages = []
        for place, kind in enumerate(chain):
            start, stop = points[place], points[place + 1]
            held = min(len(chain) - place, self.held_at_most)
            stages.append(kind.stage(start, stop, recompute=not self.sharing.fits(kind, start, stop, held)))
        return Template(micro_batch=self.micro_batch, stages=tuple(stages))


def _least(costs: Sequence[Floats], micro_batches: int | None) -> tuple[int, ...]:
    """The first layer of each stage of the best cut for so many micro-batches (None: for very many), and the number of layers.

    ``costs``: of each stage from the first layers that it may have to the ones of the next stage.
    """
    first = len(costs[0])
    every = np.arange(first)
    reached = np.full(first, np.inf)
    reached[-1] = 0.0
    stops: list[Ints] = []
    for cost in reversed(costs):
        after = reached[None, :]
        ways = np.maximum(cost, after) if micro_batches is None else np.maximum(micro_batches * cost, cost + after)
        best = np.argmin(ways, axis=1)
        stops.append(best)
        reached = ways[every, best]
    points, own = [0], 0
    for place, stop in enumerate(reversed(stops), 1):
        own = int(stop[own])
        points.append(place + own)
    return tuple(points)


def shapes(
    fleet: Fleet, tables: Tables, *, micro_batch: int, global_batch: int, sharing: Sharing, space: Space
) -> Shapes | None:
    """All rows that fit, within the limits of the space; None if there is none."""
    kinds = kinds_of(fleet, tables, micro_batch, space)
    if not kinds:
        return None
    chosen = chosen_of(kinds, space, {pool.name: pool.devices_per_node for pool in fleet.pools})
    grown = _Grown(
        fleet=fleet,
        kinds=chosen.kinds,
        pools_of=chosen.pools,
        mixed_run=chosen.run,
        held_at_most=ceil(global_batch / micro_batch),
        sharing=sharing,
        space=space,
    )
    return grown.shapes(micro_batch)


@dataclass(kw_only=True)
class _Frontier:
    """Rows of one length. ``reached``, ``total``: for each layer the longest stage and the sum of stages from it on."""

    node: Ints
    kind: Ints
    pools: Ints  # bits
    run: Ints  # stages on the last pool
    most: Ints  # pools that the row may be over
    alone: NDArray[np.bool_]  # whether the row is more than replicas of a part of it
    devices: Ints
    reached: Floats
    total: Floats

    @property
    def several(self) -> Ints:
        """Pools of each row."""
        found: Ints = ((self.pools[:, None] >> np.arange(self.devices.shape[1])) & 1).sum(axis=1)
        return found


@dataclass(frozen=True, kw_only=True)
class _Grown:
    fleet: Fleet
    kinds: tuple[Kind, ...]
    pools_of: tuple[int, ...]
    mixed_run: int
    held_at_most: int
    sharing: Sharing
    space: Space

    @cached_property
    def _pool(self) -> Ints:
        return np.array([kind.pool for kind in self.kinds])

    @cached_property
    def _need(self) -> Ints:
        return np.array([kind.devices for kind in self.kinds])

    @cached_property
    def _pools_of(self) -> Ints:
        return np.array(self.pools_of)

    @cached_property
    def _alone(self) -> NDArray[np.bool_]:
        return np.array([kind.table.may_stand_alone for kind in self.kinds])

    def shapes(self, micro_batch: int) -> Shapes | None:
        layers = len(self.kinds[0].table.costs)
        room = np.array([pool.devices for pool in self.fleet.pools])
        reached = np.full((1, layers + 1), np.inf)
        reached[0, layers] = 0.0
        frontier = _Frontier(
            node=np.array([-1]),
            kind=np.array([-1]),
            pools=np.array([0]),
            run=np.array([0]),
            most=np.array([self.space.max_pools]),
            alone=np.array([False]),
            devices=np.zeros((1, len(room)), dtype=np.int64),
            reached=reached,
            total=np.where(np.isfinite(reached), 0.0, np.inf),
        )
        parents: list[Ints] = []
        own_kinds: list[Ints] = []
        rows: list[tuple[Ints, Floats, Floats, Ints]] = []
        count = 0
        for depth in range(1, min(layers, self.space.max_stages) + 1):
            longer = self._one_more(frontier, min(depth, self.held_at_most), layers + 1 - depth, room)
            if longer is None:
                break
            frontier = longer
            parents.append(frontier.node.copy())
            own_kinds.append(frontier.kind)
            frontier.node = np.arange(count, count + len(frontier.kind))
            count += len(frontier.kind)
            whole = np.isfinite(frontier.reached[:, 0]) & frontier.alone
            rows.append(
                (frontier.node[whole], frontier.reached[whole, 0], frontier.total[whole, 0], frontier.devices[whole])
            )
        if not any(len(entry[0]) for entry in rows):
            return None
        node, longest, total, devices = (np.concatenate([entry[n] for entry in rows]) for n in range(4))
        return Shapes(
            kinds=self.kinds,
            micro_batch=micro_batch,
            held_at_most=self.held_at_most,
            sharing=self.sharing,
            recompute=self.space.recompute,
            longest_s=longest,
            total_s=total,
            devices=devices.astype(np.int64),
            _node=node.astype(np.int64),
            _parent=np.concatenate(parents),
            _kind=np.concatenate(own_kinds),
        )

    def _one_more(self, rows: _Frontier, held: int, until: int, room: Ints) -> _Frontier | None:
        """A stage of each kind before each row that may have one, as far as they fit. ``until``: the layers up to which it may be."""
        own, numbers = self._allowed(rows, room)
        costs: dict[int, Floats] = {}
        for number in np.unique(numbers).tolist():
            cost = self.sharing.seconds(self.kinds[number], held, self.space.recompute, slice(until), slice(until + 1))
            if np.isfinite(cost).any():
                costs[number] = cost
        if len(costs) < len(self.kinds):
            fit = np.isin(numbers, list(costs))
            own, numbers = own[fit], numbers[fit]
        if not len(own):
            return None
        reached, total = _grown(costs, numbers, rows.reached[own], rows.total[own])
        alive = np.flatnonzero(np.isfinite(reached).any(axis=1))
        if not len(alive):
            return None
        own, numbers = own[alive], numbers[alive]
        pool = self._pool[numbers]
        devices = rows.devices[own]
        devices[np.arange(len(own)), pool] += self._need[numbers]
        return _Frontier(
            node=rows.node[own],
            kind=numbers,
            pools=rows.pools[own] | (1 << pool),
            run=np.where(rows.kind[own] == numbers, rows.run[own] + 1, 1),
            most=np.minimum(rows.most[own], self._pools_of[numbers]),
            alone=rows.alone[own] | self._alone[numbers],
            devices=devices,
            reached=reached[alive],
            total=total[alive],
        )

    def _allowed(self, rows: _Frontier, room: Ints) -> tuple[Ints, Ints]:
        """Which rows may be joined by a stage of which kinds: numbers of both, kind by kind."""
        kind, pool, several = np.arange(len(self.kinds))[:, None], self._pool[:, None], rows.several
        same = rows.kind == kind
        other = (rows.pools >> pool) & 1 == 0
        # A row of one pool may be long; a row of several has at most so many stages on each.
        short = ((several < 2) & self._alone[:, None]) | (rows.run < self.mixed_run)
        most = np.minimum(rows.most, self._pools_of[:, None])
        allowed = (same & short) | (other & (several < most) & ((several == 0) | (rows.run <= self.mixed_run)))
        allowed &= rows.devices.T[self._pool] + self._need[:, None] <= room[pool]
        numbers, own = np.nonzero(allowed)
        return own, numbers


def _grown(costs: Mapping[int, Floats], numbers: Ints, reached: Floats, total: Floats) -> tuple[Floats, Floats]:
    """One more stage before each row, of the kinds ``numbers``, which ascend.

    Shapes: of each cost [first, first + 1], of so many first layers; twice [rows, layers + 1].
    """
    longest, whole = np.full_like(reached, np.inf), np.full_like(total, np.inf)
    first = len(next(iter(costs.values())))
    start = np.arange(first)[None, :]
    for low, high in _at_once(numbers, max(1, _CELLS // first**2)):
        own = slice(low, high)
        one = numbers[low] == numbers[high - 1]
        kinds = numbers[low : low + 1] if one else numbers[own]
        cost = costs[int(kinds[0])][None] if one else np.stack([costs[number] for number in kinds.tolist()])
        worse = np.maximum(cost, reached[own, None, : first + 1])
        stop = worse.argmin(axis=2)
        row = np.arange(high - low)[:, None]
        longest[own, :first] = worse[row, start, stop]
        whole[own, :first] = cost[0 if one else row, start, stop] + total[own][row, stop]
    return longest, whole


def _at_once(numbers: Ints, most: int) -> Iterator[tuple[int, int]]:
    """Rows [low, high), at most so many: of one kind, or where that would be few, of several."""
    ends = [*np.flatnonzero(np.diff(numbers)) + 1, len(numbers)]
    low = high = 0
    for end in map(int, ends):
        if high > low and (end - low > most or end - high > most // 4):
            yield low, high
            low = high
        while end - low > most:
            yield low, low + most
            low += most
        high = end
    if high > low:
        yield low, high

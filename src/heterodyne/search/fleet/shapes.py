"""Shapes of pipelines: rows of stages on kinds of devices, each with the cut whose slowest stage is as fast as can be.

A dynamic program from the last layer to the first. The last stage of 1F1B holds one micro-batch, the one before it two, so a row
that is grown from its end knows what each new stage holds, and all rows that end alike share their work. With T[s][l] the least
longest stage of a row s over the layers from l on: T[k + s][l] = min over e of max(cost of stage [l, e) on kind k, T[s][e]), which is exact
(the min-max partition of AutoPipe and PipeDream, with a memory limit for each stage). Alike devices are one kind, so the number of rows
grows with kinds and stages and not with devices.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

import numpy as np
from numpy.typing import NDArray

from heterodyne.cluster.fleet import Fleet
from heterodyne.cost.layers import Widths
from heterodyne.search.fleet.network import Network
from heterodyne.search.fleet.plan import Stage, Template
from heterodyne.search.fleet.space import Space
from heterodyne.search.fleet.tables import Floats, Table, Tables

__all__ = ["Kind", "Shapes", "Sharing", "kinds_of", "shapes"]

_FEW = (2, 4, 16)
_CELLS = 1 << 16  # of an array that is worked on at once
Ints = NDArray[np.int64]


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

    def seconds(self, kind: Kind, held: int, recompute: bool) -> Floats:
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
class Kind:
    """Devices of a pool, as many as a stage takes. ``pool``: its number in the fleet."""

    pool: int
    name: str
    widths: Widths
    memory_bytes: float
    table: Table

    @property
    def devices(self) -> int:
        return self.widths.devices

    def stage(self, start: int, stop: int, *, recompute: bool) -> Stage:
        tensor, context, data = self.widths
        return Stage(
            pool=self.name, width=tensor, context=context, data=data, start=start, stop=stop, recompute=recompute
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

    def templates(self, row: int) -> list[Template]:
        """With the cut whose slowest stage is fastest, and with those that are best for few micro-batches.

        Stage i cannot begin before the ones before it have had the first micro-batch, nor end after they have begun the last
        backward, so n micro-batches take at least H[i] = max(n cost[i], cost[i] + H[i + 1]), which the cut makes least.
        """
        chain = []
        node = int(self._node[row])
        while node >= 0:
            chain.append(self.kinds[int(self._kind[node])])
            node = int(self._parent[node])
        costs = [self._cost(kind, len(chain) - place) for place, kind in enumerate(chain)]
        found = [self._template(chain, _least(costs, None))]
        counts = [count for count in _FEW if count <= self.held_at_most and len(chain) > 1]
        found += [self._template(chain, _least(costs, count)) for count in counts]
        return list(dict.fromkeys(found))

    def _cost(self, kind: Kind, back: int) -> Floats:
        return self.sharing.seconds(kind, min(back, self.held_at_most), self.recompute)

    def _template(self, chain: Sequence[Kind], points: Sequence[int]) -> Template:
        stages = []
        for place, kind in enumerate(chain):
            start, stop = points[place], points[place + 1]
            held = min(len(chain) - place, self.held_at_most)
            stages.append(kind.stage(start, stop, recompute=not self.sharing.fits(kind, start, stop, held)))
        return Template(micro_batch=self.micro_batch, stages=tuple(stages))


def _least(costs: Sequence[Floats], micro_batches: int | None) -> list[int]:
    """The first layer of each stage of the best cut for so many micro-batches (None: for very many), and the number of layers."""
    layers = costs[0].shape[0] - 1
    reached = np.full(layers + 1, np.inf)
    reached[layers] = 0.0
    stops: list[Ints] = []
    for cost in reversed(costs):
        after = reached[None, :]
        ways = np.maximum(cost, after) if micro_batches is None else np.maximum(micro_batches * cost, cost + after)
        stops.append(np.argmin(ways, axis=1))
        reached = ways.min(axis=1)
    points = [0]
    for stop in reversed(stops):
        points.append(int(stop[points[-1]]))
    return points


def kinds_of(fleet: Fleet, tables: Tables, micro_batch: int, space: Space) -> tuple[Kind, ...]:
    """Every pool with every width that fills its nodes without a rest: a width that divides the next larger one, or the node."""
    found = []
    for number, pool in enumerate(fleet.pools):
        if space.pools is not None and pool.name not in space.pools:
            continue
        for widths in usable_widths(tables.costs.widths(pool.kind), pool.devices_per_node):
            table = tables.table(pool.kind, widths, micro_batch)
            joined = widths.devices == 1 or pool.inside is not None
            if table is not None and joined and widths.tensor <= space.max_width:
                found.append(
                    Kind(pool=number, name=pool.name, widths=widths, memory_bytes=float(pool.memory_bytes), table=table)
                )
    return tuple(found)


def usable_widths(widths: Sequence[Widths], devices_per_node: int) -> tuple[Widths, ...]:
    """Those whose devices divide the node and each other, from the most on: then stages of any of them fill nodes without a rest."""
    chosen: list[int] = []
    for devices in sorted({own.devices for own in widths}, reverse=True):
        if (chosen[-1] if chosen else devices_per_node) % devices == 0:
            chosen.append(devices)
    return tuple(own for own in widths if own.devices in chosen)


def shapes(
    fleet: Fleet, tables: Tables, *, micro_batch: int, global_batch: int, sharing: Sharing, space: Space
) -> Shapes | None:
    """All rows that fit, within the limits of the space; None if there is none."""
    kinds = kinds_of(fleet, tables, micro_batch, space)
    if not kinds:
        return None
    grown = _Grown(
        fleet=fleet, kinds=kinds, held_at_most=ceil(global_batch / micro_batch), sharing=sharing, space=space
    )
    return grown.shapes(micro_batch)


@dataclass(kw_only=True)
class _Frontier:
    """Rows of one length. ``reached``, ``total``: for each layer the longest stage and the sum of stages from it on."""

    node: Ints
    kind: Ints
    pools: Ints  # bits
    run: Ints  # stages on the last pool
    devices: Ints
    reached: Floats
    total: Floats


@dataclass(frozen=True, kw_only=True)
class _Grown:
    fleet: Fleet
    kinds: tuple[Kind, ...]
    held_at_most: int
    sharing: Sharing
    space: Space

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
            devices=np.zeros((1, len(room)), dtype=np.int64),
            reached=reached,
            total=np.where(np.isfinite(reached), 0.0, np.inf),
        )
        mixed_run = self._mixed_run(layers)
        parents: list[Ints] = []
        own_kinds: list[Ints] = []
        rows: list[tuple[Ints, Floats, Floats, Ints]] = []
        count = 0
        for depth in range(1, min(layers, self.space.max_stages) + 1):
            held = min(depth, self.held_at_most)
            longer = []
            for number, kind in enumerate(self.kinds):
                cost = self.sharing.seconds(kind, held, self.space.recompute)
                if not np.isfinite(cost).any():
                    continue
                grown = self._extend(frontier, number, cost, room, mixed_run)
                if grown is not None:
                    longer.append(grown)
            if not longer:
                break
            frontier = _joined(longer)
            parents.append(frontier.node.copy())
            own_kinds.append(frontier.kind)
            frontier.node = np.arange(count, count + len(frontier.kind))
            count += len(frontier.kind)
            whole = np.isfinite(frontier.reached[:, 0])
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

    def _mixed_run(self, layers: int) -> int:
        """How many stages of one pool stand in a row with other pools, so that the work stays within its limit."""
        pairs = sum(a.pool != b.pool for a in self.kinds for b in self.kinds)
        triples = sum(len({a.pool, b.pool, c.pool}) == 3 for a in self.kinds for b in self.kinds for c in self.kinds)
        most = self.space.cells / (layers + 1) ** 2
        longest = 0
        for run in range(1, self.space.max_stages + 1):
            rows = pairs * run**2 + (triples * run**3 if self.space.max_pools > 2 else 0)
            if rows > most:
                break
            longest = run
        return max(longest, 1)

    def _extend(self, rows: _Frontier, number: int, cost: Floats, room: Ints, mixed_run: int) -> _Frontier | None:
        kind = self.kinds[number]
        same = rows.kind == number
        other = (rows.pools >> kind.pool) & 1 == 0
        several = np.array([int(p).bit_count() for p in rows.pools])
        first = rows.pools == 0
        # A row of one pool may be long; a row of several has at most so many stages on each.
        short = (several < 2) | (rows.run < mixed_run)
        allowed = (same & short) | (other & (several < self.space.max_pools) & (first | (rows.run <= mixed_run)))
        allowed &= rows.devices[:, kind.pool] + kind.devices <= room[kind.pool]
        chosen = np.flatnonzero(allowed)
        if not len(chosen):
            return None
        reached, total = _grow(cost, rows.reached[chosen], rows.total[chosen])
        alive = np.isfinite(reached).any(axis=1)
        chosen = chosen[alive]
        if not len(chosen):
            return None
        devices = rows.devices[chosen].copy()
        devices[:, kind.pool] += kind.devices
        return _Frontier(
            node=rows.node[chosen],
            kind=np.full(len(chosen), number),
            pools=rows.pools[chosen] | (1 << kind.pool),
            run=np.where(same[chosen], rows.run[chosen] + 1, 1),
            devices=devices,
            reached=reached[alive],
            total=total[alive],
        )


def _grow(cost: Floats, reached: Floats, total: Floats) -> tuple[Floats, Floats]:
    """One more stage before each row."""
    layers = cost.shape[0]
    longest = np.empty_like(reached)
    whole = np.empty_like(total)
    step = max(1, _CELLS // layers**2)
    at = np.arange(layers)[None, :]
    for low in range(0, len(reached), step):
        own = slice(low, low + step)
        worse = np.maximum(cost[None, :, :], reached[own, None, :])
        stop = worse.argmin(axis=2)
        longest[own] = np.take_along_axis(worse, stop[:, :, None], axis=2)[:, :, 0]
        whole[own] = cost[at, stop] + np.take_along_axis(total[own], stop, axis=1)
    return longest, whole


def _joined(parts: Sequence[_Frontier]) -> _Frontier:
    return _Frontier(
        node=np.concatenate([p.node for p in parts]),
        kind=np.concatenate([p.kind for p in parts]),
        pools=np.concatenate([p.pools for p in parts]),
        run=np.concatenate([p.run for p in parts]),
        devices=np.concatenate([p.devices for p in parts]),
        reached=np.concatenate([p.reached for p in parts]),
        total=np.concatenate([p.total for p in parts]),
    )

"""Shapes of pipelines: rows of stages on kinds of devices, each with the cut whose slowest stage is as fast as can be.

A dynamic program from the last layer to the first. The last stage of 1F1B holds one micro-batch, the one before it two, so a row
that is grown from its end knows what each new stage holds, and all rows that end alike share their work. With T[s][l] the least
longest stage of a row s over the layers from l on: T[k + s][l] = min over e of max(cost of stage [l, e) on kind k, T[s][e]), which is exact
(the min-max partition of AutoPipe and PipeDream, with a memory limit for each stage). Alike devices are one kind, so the number of rows
grows with kinds and stages and not with devices.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import permutations
from math import ceil

import numpy as np
from numpy.typing import NDArray

from heterodyne.cluster.fleet import Fleet, Pool
from heterodyne.cost.layers import LayerCost, Widths
from heterodyne.search.fleet.network import Network
from heterodyne.search.fleet.plan import Stage, Template
from heterodyne.search.fleet.space import Space
from heterodyne.search.fleet.tables import Floats, Table, Tables

__all__ = ["Kind", "Shapes", "Sharing", "kinds_of", "shapes", "undominated", "usable_widths"]

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


def kinds_of(fleet: Fleet, tables: Tables, micro_batch: int, space: Space, *, every: bool = False) -> tuple[Kind, ...]:
    """Every pool with every width that fills its nodes without a rest (`usable_widths`), but for those that others are better than
    (`undominated`) unless ``every`` is asked for.
    """
    layers = dict.fromkeys(tables.costs.layers)
    first = [tables.costs.layers.index(layer) for layer in layers]
    found: list[Kind] = []
    for number, pool in enumerate(fleet.pools):
        if space.pools is not None and pool.name not in space.pools:
            continue
        own = []
        for widths in usable_widths(tables.costs.widths(pool.kind), pool.devices_per_node):
            limits = (space.max_width, space.max_context, space.max_data)
            if any(width > limit for width, limit in zip(widths, limits, strict=True)):
                continue
            if widths.devices > pool.devices or not _connected(fleet, pool, widths.devices):
                continue
            table = tables.table(pool.kind, widths, micro_batch)
            # Over several nodes micro-batches alone are not shared, unless a node is one device: it would be further replicas.
            beyond = widths.devices > pool.devices_per_node > 1
            runs = table is not None and (not space.runnable or _runs(widths, table))
            # Among many devices pipelines of unlike numbers do what stages that share a micro-batch do among few.
            alone = beyond or fleet.devices > space.few_devices
            if table is not None and runs and (table.may_stand_alone or not alone):
                own.append(
                    Kind(pool=number, name=pool.name, widths=widths, memory_bytes=float(pool.memory_bytes), table=table)
                )
        found += own if every else undominated(own, first)
    return tuple(found)


def _runs(widths: Widths, table: Table) -> bool:
    """Whether this library's runtime has such stages."""
    return sum(width > 1 for width in widths) <= 1 and (not table.expert_width or widths.copies == 1)


def _connected(fleet: Fleet, pool: Pool, devices: int) -> bool:
    if devices > pool.devices_per_node and fleet.wire(pool, pool) is None:
        return False
    return devices == 1 or pool.devices_per_node == 1 or pool.inside is not None


def undominated(kinds: Sequence[Kind], layers: Sequence[int]) -> list[Kind]:
    """Without those of which another one of the same pool, with as many devices and copies of all parameters, is no worse in any figure
    of any layer (of alike ones the first stays).

    Whatever plan has such a stage is no faster, and needs no less memory anywhere, than with the other one in its place: seconds, bytes
    and what is exchanged only ever add up, and grow with each figure.

    Args:
        layers: one of each kind.
    """
    alike: dict[object, list[Kind]] = {}
    for kind in kinds:
        copies = (kind.widths.copies, kind.table.expert_width)
        alike.setdefault((kind.pool, kind.devices, copies), []).append(kind)
    kept = set()
    for group in alike.values():
        figures = [np.array([_figures(kind.table.costs[layer]) for layer in layers]) for kind in group]
        for number, own in enumerate(figures):
            beaten = any(
                np.all(other <= own) and (place < number or np.any(other < own))
                for place, other in enumerate(figures)
                if place != number
            )
            if not beaten:
                kept.add(id(group[number]))
    return [kind for kind in kinds if id(kind) in kept]


def _figures(cost: LayerCost) -> tuple[float, ...]:
    reduced = cost.gradient_bytes if cost.reduced_bytes is None else cost.reduced_bytes
    return (
        cost.forward_s,
        cost.backward_s,
        cost.update_s,
        cost.parameter_bytes,
        cost.gradient_bytes,
        cost.optimizer_bytes,
        cost.kept_bytes,
        cost.kept_bytes_recomputed,
        cost.workspace_bytes,
        cost.output_bytes,
        cost.expert_bytes,
        reduced - cost.expert_bytes,
    )


def usable_widths(widths: Sequence[Widths], devices_per_node: int) -> tuple[Widths, ...]:
    """Those whose devices divide the node and each other, from the most on: then stages of any of them fill nodes without a rest.

    A stage may have whole nodes too; its layers are in parts inside each of them.
    """
    chosen: list[int] = []
    counts = sorted({own.devices for own in widths}, reverse=True)
    for devices in counts:
        if devices <= devices_per_node and (chosen[-1] if chosen else devices_per_node) % devices == 0:
            chosen.append(devices)
    whole = devices_per_node
    for devices in reversed(counts):
        if devices > devices_per_node and devices % whole == 0:
            chosen.append(devices)
            whole = devices
    return tuple(own for own in widths if own.devices in chosen and own.tensor <= devices_per_node)


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


@dataclass(frozen=True, kw_only=True)
class Chosen:
    """Kinds that rows are made of.

    Args:
        pools: for each kind, over how many pools the rows may be that it stands in.
        run: how many stages of one pool stand in a row with other pools.
    """

    kinds: tuple[Kind, ...]
    pools: tuple[int, ...]
    run: int


def chosen_of(kinds: Sequence[Kind], space: Space, per_node: Mapping[str, int]) -> Chosen:
    """So that the work stays about within its limit (`Space.cells`), the fastest and the one that needs least memory of those with as
    many devices of a pool; in rows over three pools and more the last one only, as far as it is in one node.

    Args:
        per_node: devices of a node, by pool.
    """
    layers = len(kinds[0].table.costs)
    most = space.cells / (layers + 1) ** 2
    fastest = _best(kinds, lambda kind: kind.table.forward_s(0, layers) + kind.table.backward_s(0, layers, False))
    leanest = _best(kinds, lambda kind: kind.table.memory(0, layers, recompute=space.recompute, held=1).total)
    few = [number for number in range(len(kinds)) if number in fastest or number in leanest]
    every = list(range(len(kinds)))
    own = every if len(kinds) * min(layers, space.max_stages) <= most else few
    pairs = own if _pairs([kinds[n] for n in own]) <= most else few
    triples = pairs
    if space.max_pools > 2 and _pairs([kinds[n] for n in pairs]) + _triples([kinds[n] for n in pairs]) > most:
        triples = [
            number for number in few if number in leanest and kinds[number].devices <= per_node[kinds[number].name]
        ]
    count_2 = _pairs([kinds[n] for n in pairs])
    count_3 = _triples([kinds[n] for n in triples]) if space.max_pools > 2 else 0
    run = 1
    while run < space.max_stages and count_2 * (run + 1) ** 2 + count_3 * (run + 1) ** 3 <= most:
        run += 1
    return Chosen(
        kinds=tuple(kinds[n] for n in own),
        pools=tuple(space.max_pools if n in triples else 2 if n in pairs else 1 for n in own),
        run=run,
    )


def _best(kinds: Sequence[Kind], figure: Callable[[Kind], float]) -> set[int]:
    """Of each pool and number of devices, the numbers of those with the least of a figure."""
    found: dict[tuple[int, int], tuple[float, int]] = {}
    for number, kind in enumerate(kinds):
        own = (figure(kind), number)
        found[kind.pool, kind.devices] = min(own, found.get((kind.pool, kind.devices), own))
    return {number for _, number in found.values()}


def _pairs(kinds: Sequence[Kind]) -> int:
    """Rows of two stages in different pools."""
    return sum(a.pool != b.pool for a in kinds for b in kinds)


def _triples(kinds: Sequence[Kind]) -> int:
    count: dict[int, int] = {}
    for kind in kinds:
        count[kind.pool] = count.get(kind.pool, 0) + 1
    return sum(a * b * c for a, b, c in permutations(count.values(), 3))


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


@dataclass(frozen=True, kw_only=True)
class _Grown:
    fleet: Fleet
    kinds: tuple[Kind, ...]
    pools_of: tuple[int, ...]
    mixed_run: int
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
            held = min(depth, self.held_at_most)
            several = np.array([int(pools).bit_count() for pools in frontier.pools])
            if depth > 1 and np.all((several == 1) & (frontier.run > self.mixed_run)):
                grown = iter([self._lengthened(frontier, held, room)])
            else:
                grown = (self._extend(frontier, several, number, held, room) for number in range(len(self.kinds)))
            longer = [rows for rows in grown if rows is not None]
            if not longer:
                break
            frontier = _joined(longer)
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

    def _lengthened(self, rows: _Frontier, held: int, room: Ints) -> _Frontier | None:
        """What `_extend` makes of rows of one kind each that no other pool joins any more, all at once."""
        kinds = [self.kinds[number] for number in rows.kind]
        own = np.array([kind.pool for kind in kinds])
        need = np.array([kind.devices for kind in kinds])
        at = np.arange(len(kinds))
        chosen = np.flatnonzero(rows.alone & (rows.devices[at, own] + need <= room[own]))
        if not len(chosen):
            return None
        cost = np.stack([self.sharing.seconds(kinds[number], held, self.space.recompute) for number in chosen])
        reached, total = _grown(cost, rows.reached[chosen], rows.total[chosen])
        alive = np.isfinite(reached).any(axis=1)
        chosen = chosen[alive]
        if not len(chosen):
            return None
        devices = rows.devices[chosen].copy()
        devices[np.arange(len(chosen)), own[chosen]] += need[chosen]
        return _Frontier(
            node=rows.node[chosen],
            kind=rows.kind[chosen],
            pools=rows.pools[chosen],
            run=rows.run[chosen] + 1,
            most=rows.most[chosen],
            alone=rows.alone[chosen],
            devices=devices,
            reached=reached[alive],
            total=total[alive],
        )

    def _extend(self, rows: _Frontier, several: Ints, number: int, held: int, room: Ints) -> _Frontier | None:
        """By a stage of a kind before each row that may have one. ``several``: pools of each row."""
        kind, pools, mixed_run = self.kinds[number], self.pools_of[number], self.mixed_run
        alone = kind.table.may_stand_alone
        same = rows.kind == number
        other = (rows.pools >> kind.pool) & 1 == 0
        first = several == 0
        # A row of one pool may be long; a row of several has at most so many stages on each.
        short = ((several < 2) & alone) | (rows.run < mixed_run)
        most = np.minimum(rows.most, pools)
        allowed = (same & short) | (other & (several < most) & (first | (rows.run <= mixed_run)))
        allowed &= rows.devices[:, kind.pool] + kind.devices <= room[kind.pool]
        chosen = np.flatnonzero(allowed)
        if not len(chosen):
            return None
        cost = self.sharing.seconds(kind, held, self.space.recompute)
        if not np.isfinite(cost).any():
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
            most=most[chosen],
            alone=rows.alone[chosen] | alone,
            devices=devices,
            reached=reached[alive],
            total=total[alive],
        )


def _grow(cost: Floats, reached: Floats, total: Floats) -> tuple[Floats, Floats]:
    """One more stage before each row, of the same kind."""
    longest = np.empty_like(reached)
    whole = np.empty_like(total)
    step = max(1, _CELLS // cost.shape[0] ** 2)
    for low in range(0, len(reached), step):
        own = slice(low, low + step)
        longest[own], whole[own] = _grown(cost[None, :, :], reached[own], total[own])
    return longest, whole


def _grown(cost: Floats, reached: Floats, total: Floats) -> tuple[Floats, Floats]:
    """One more stage before each row. Shapes: [rows or 1, layers + 1, layers + 1], twice [rows, layers + 1]."""
    worse = np.maximum(cost, reached[:, None, :])
    stop = worse.argmin(axis=2)
    row, start = np.arange(len(reached))[:, None], np.arange(cost.shape[1])[None, :]
    own = cost[row if len(cost) > 1 else 0, start, stop]
    return worse[row, start, stop], own + total[row, stop]


def _joined(parts: Sequence[_Frontier]) -> _Frontier:
    return _Frontier(
        node=np.concatenate([p.node for p in parts]),
        kind=np.concatenate([p.kind for p in parts]),
        pools=np.concatenate([p.pools for p in parts]),
        run=np.concatenate([p.run for p in parts]),
        most=np.concatenate([p.most for p in parts]),
        alone=np.concatenate([p.alone for p in parts]),
        devices=np.concatenate([p.devices for p in parts]),
        reached=np.concatenate([p.reached for p in parts]),
        total=np.concatenate([p.total for p in parts]),
    )

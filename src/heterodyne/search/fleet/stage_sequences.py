"""Sequences of stages with their bottleneck times, built from the last layer to the first, for all micro-batch sizes at once.

Under 1F1B the last stage holds one micro-batch, the one before it two, so a sequence built from its end knows what each new stage holds,
and sequences with the same end share their work. With T[s][l] the least bottleneck time of a sequence s over the layers from l on: T[k +
s][l] = min over e of max(cost of stage [l, e) on kind k, T[s][e]). This is the exact min-max partition (AutoPipe, PipeDream) with a
memory limit per stage.

The cost of a stage grows with its end, and the least of T[s] up to its end falls. They cross at a point found by doubling steps over
windowed minima of T[s].
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from heterodyne.search.fleet.arrays import Floats, Ints
from heterodyne.search.fleet.stage_costs import StageCosts

__all__ = ["Grower", "Row", "Rules"]

_CELLS = 1 << 15  # of an array that is worked on at once


@dataclass(frozen=True, kw_only=True)
class Rules:
    """Which stages may precede each other, by number of the kind: arrays have one value per kind.

    Args:
        pool, devices: of a stage. ``size``: index of the micro-batch size; a sequence has one.
        pools: the largest number of pools in a sequence with such a stage.
        run: the largest number of contiguous alike stages in a sequence over several pools.
        held: the largest number of micro-batches in flight.
        alone: whether a sequence is more than replicas of a part of it.
        room: devices of each pool.
    """

    pool: Ints
    devices: Ints
    size: Ints
    pools: Ints
    run: Ints
    held: Ints
    alone: NDArray[np.bool_]
    room: Ints
    max_stages: int


@dataclass(frozen=True, kw_only=True)
class Row:
    """Sequences of one length that may be extended. Arrays have one value per sequence.

    Args:
        node, parent: its number, and that of the sequence without its first stage.
        kind, size: of its first stage and of its micro-batches.
        pools: bit mask; ``run``: alike stages that it begins with; ``most``: pools that it may span.
        reached, total: bottleneck time and sum of stage times from each layer on. Shape [sequences, layers + 1].
    """

    node: Ints
    parent: Ints
    kind: Ints
    size: Ints
    pools: Ints
    run: Ints
    most: Ints
    alone: NDArray[np.bool_]
    devices: Ints
    reached: Floats
    total: Floats


@dataclass(frozen=True, kw_only=True)
class Grower:
    """Builds all sequences that the rules allow and that fit in memory."""

    costs: StageCosts
    rules: Rules

    def rows(self) -> list[Row]:
        """The sequences, by length."""
        rules, layers = self.rules, self.costs.layers
        sizes = np.unique(rules.size)
        reached = np.full((len(sizes), layers + 1), np.inf)
        reached[:, layers] = 0.0
        none = np.full(len(sizes), -1)
        row = Row(
            node=none,
            parent=none,
            kind=none,
            size=sizes,
            pools=0 * none,
            run=0 * none,
            most=np.full(len(sizes), rules.pools.max()),
            alone=none > 0,
            devices=np.zeros((len(sizes), len(rules.room)), dtype=np.int64),
            reached=reached,
            total=np.where(np.isfinite(reached), 0.0, np.inf),
        )
        found: list[Row] = []
        count = 0
        for depth in range(1, min(layers, rules.max_stages) + 1):
            row = self._longer(row, depth, count)
            if not len(row.kind):
                break
            count += len(row.kind)
            found.append(row)
        return found

    def _longer(self, row: Row, depth: int, first: int) -> Row:
        """The sequences extended by one stage, as far as they fit. ``first``: the number of the first new one."""
        rules = self.rules
        own, kind = self._allowed(row)
        held = np.minimum(depth, rules.held[kind])
        reached, total = self._grown(row, own, kind, held, self.costs.layers + 1 - depth)
        alive = np.flatnonzero(np.isfinite(reached).any(axis=1))
        own, kind = own[alive], kind[alive]
        devices = row.devices[own]
        devices[np.arange(len(own)), rules.pool[kind]] += rules.devices[kind]
        return Row(
            node=np.arange(first, first + len(own)),
            parent=row.node[own],
            kind=kind,
            size=row.size[own],
            pools=row.pools[own] | (1 << rules.pool[kind]),
            run=np.where(row.kind[own] == kind, row.run[own] + 1, 1),
            most=np.minimum(row.most[own], rules.pools[kind]),
            alone=row.alone[own] | rules.alone[kind],
            devices=devices,
            reached=reached[alive],
            total=total[alive],
        )

    def _allowed(self, row: Row) -> tuple[Ints, Ints]:
        """Pairs of sequence and kind that the rules allow, as two arrays of numbers."""
        rules = self.rules
        several = ((row.pools[:, None] >> np.arange(len(rules.room))) & 1).sum(axis=1)
        again = np.flatnonzero(row.kind >= 0)
        kind = row.kind[again]
        again = again[((several[again] < 2) & rules.alone[kind]) | (row.run[again] < rules.run[kind])]
        # Only short rows may go on in another pool.
        short = np.flatnonzero((several < row.most) & (row.run <= rules.run[row.kind]))
        first = several[short, None] == 0
        other = (rules.size == row.size[short, None]) & ((row.pools[short, None] >> rules.pool) & 1 == 0)
        other &= first | (several[short, None] < rules.pools)
        at, kinds = np.nonzero(other)
        own, kind = np.concatenate([again, short[at]]), np.concatenate([row.kind[again], kinds])
        room = row.devices[own, rules.pool[kind]] + rules.devices[kind] <= rules.room[rules.pool[kind]]
        own, kind = own[room], kind[room]
        order = np.lexsort((own, kind))
        return own[order], kind[order]

    def _grown(self, row: Row, own: Ints, kind: Ints, held: Ints, until: int) -> tuple[Floats, Floats]:
        """``until``: the last layer before which the new stage may end."""
        windows = _windows(row.reached, until)
        count = self.costs.layers + 1
        longest, whole = np.full((len(own), count), np.inf), np.full((len(own), count), np.inf)
        step = max(1, _CELLS // until)
        for low in range(0, len(own), step):
            part = slice(low, low + step)
            longest[part, :until], whole[part, :until] = self._best(
                row, windows, own[part, None], kind[part, None], held[part, None], until
            )
        return longest, whole

    def _best(
        self, row: Row, windows: Sequence[tuple[Floats, Ints]], own: Ints, kind: Ints, held: Ints, until: int
    ) -> tuple[Floats, Floats]:
        start = np.arange(until)[None, :]
        base = own * row.reached.shape[1]
        stages = self.costs.of(kind, held, start)
        end = np.broadcast_to(start, (len(own), until))  # up to which the stage is no longer than what follows
        best, stop = np.full(end.shape, np.inf), end
        for size, (least, at) in zip((1 << n for n in range(len(windows) - 1, -1, -1)), windows[::-1], strict=True):
            further = end + size
            inside = further <= until
            further = np.minimum(further, until)
            behind = base + np.minimum(end + 1, until)
            now = least[behind]
            less = np.minimum(best, now)
            takes = inside & (stages.until(np.maximum(further, start + 1)) < less)
            stop = np.where(takes & (now < best), at[behind], stop)
            best = np.where(takes, less, best)
            end = np.where(takes, further, end)
        last = np.minimum(end + 1, until)
        later = np.maximum(stages.until(last), row.reached.ravel()[base + last])
        # Where nothing fits any stop will do.
        stop = np.where((later < best) | (stop <= start), last, stop)
        best = np.minimum(best, later)
        return best, stages.until(stop) + row.total.ravel()[base + stop]


def _windows(reached: Floats, until: int) -> list[tuple[Floats, Ints]]:
    """The least of 1, 2, 4, ... layers from each one on and where that is, flat."""
    least, at = reached, np.broadcast_to(np.arange(reached.shape[1]), reached.shape)
    found = [(least.ravel(), at.ravel())]
    size = 1
    while 2 * size <= until:
        longer, where = least.copy(), at.copy()
        beyond = least[:, size:] < least[:, :-size]
        np.copyto(longer[:, :-size], least[:, size:], where=beyond)
        np.copyto(where[:, :-size], at[:, size:], where=beyond)
        least, at = longer, where
        found.append((least.ravel(), at.ravel()))
        size *= 2
    return found

"""The shapes of pipelines that matter, out of all that fit: those that are worth most at some times, and the best by themselves.

What a shape is worth is what it does in a time, less what its devices would do elsewhere, which the prices of the relaxed knapsack say.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from heterodyne.search.fleet.arrays import Floats, Ints
from heterodyne.search.fleet.counts import Limits, best_per_devices, capacities, relaxed
from heterodyne.search.fleet.plan import Template
from heterodyne.search.fleet.predict import Predictor
from heterodyne.search.fleet.shapes import Shapes

__all__ = ["Columns", "together"]

_ALONE = 3  # shapes for each number of pipelines that are all alike; twice as many where there are few devices
_ONE_BY_ONE = 8  # numbers of pipelines up to which every number is tried


@dataclass(frozen=True, kw_only=True)
class Columns:
    """Chooses among shapes. ``most``: about how many for each way to choose; ``sizes``: of micro-batches; ``few``: whole numbers of devices
    matter, so that more are chosen.
    """

    predictor: Predictor
    sizes: tuple[int, ...]
    most: int
    few: bool

    def of(self, rows: Sequence[Shapes], limits: Limits, seconds: float, *, filled: bool = True) -> list[Template]:
        """The shapes that are worth most at a time: without an exchange of gradients, and with about what it takes.

        ``filled``: pipelines have to be filled and drained once; else they are taken never to wait.
        """
        longest, total, sizes, devices = together(rows)
        if not filled:
            total = longest
        chosen: dict[int, None] = {}
        several = self.most // 4
        each = max(1, several // len(rows))
        exchange_s = self._exchange_s(devices)
        for extra, later in ((0.0, 1.0), (1.0, 1.0), (0.0, 1.1), (1.0, 1.25)):
            at_s = later * (seconds + extra * float(exchange_s.min()))
            capacity = capacities(longest, total + extra * exchange_s, sizes, at_s)
            if later > 1:
                capacity = np.floor(capacity / sizes) * sizes
            keep: Ints = best_per_devices(capacity, devices, most=2)
            known = relaxed(capacity[keep], devices[keep], limits)
            if known is None:
                continue
            worth = capacity - devices @ known.prices
            per_device = worth / np.maximum(1, devices.sum(axis=1))
            for value in (worth, per_device):
                chosen.update(dict.fromkeys(_first(keep, value, several)))
                for size in self.sizes:
                    own = np.flatnonzero(sizes == size)
                    best = own[best_per_devices(capacity[own], devices[own])]
                    chosen.update(dict.fromkeys(_first(best, value, each)))
        chosen.update(dict.fromkeys(self._alone(longest, total, sizes, devices, limits)))
        return _templates(rows, chosen)

    def alike(self, rows: Sequence[Shapes], limits: Limits) -> list[Template]:
        """The shapes that are best where all pipelines are alike."""
        return _templates(rows, dict.fromkeys(self._alone(*together(rows), limits)))

    def _alone(self, longest: Floats, total: Floats, sizes: Ints, devices: Ints, limits: Limits) -> list[int]:
        """The shapes that do the whole batch fastest in so many pipelines all alike."""
        most = np.min(np.where(devices > 0, limits.room // np.maximum(1, devices), limits.room.max()), axis=1)
        exchange_s = self._exchange_s(devices)
        found: dict[int, None] = {}
        count = limits.least
        shapes = 2 * _ALONE if self.few else _ALONE
        while count <= min(int(most.max()), limits.most or count):
            fits = np.flatnonzero(most >= count)
            rounds: Floats = np.ceil(self.predictor.global_batch / (sizes[fits] * count))
            step_s = total[fits] + (rounds - 1) * longest[fits] + (exchange_s[fits] if count > 1 else 0.0)
            best = fits[np.argsort(step_s, kind="stable")[:shapes]]
            found.update(dict.fromkeys(best.tolist()))
            count = count + 1 if count < _ONE_BY_ONE else 2 * count
        return list(found)

    def _exchange_s(self, devices: Ints) -> Floats:
        """About what the gradients take of pipelines over so many devices: each node of a pipeline has its part of the layers."""
        table = next(
            table
            for pool in self.predictor.fleet.pools
            for widths in self.predictor.tables.costs.widths(pool.kind)
            for size in self.sizes
            if (table := self.predictor.tables.table(pool.kind, widths, size)) is not None
        )
        size = table.reduced_bytes(0, len(table.costs))
        wires = [self.predictor.fleet.wire(pool, pool) for pool in self.predictor.fleet.pools]
        slow = np.array([0.0 if wire is None else 2 * size / wire.bandwidth_bytes_per_s for wire in wires])
        stages = np.maximum(1, devices.sum(axis=1))
        found: Floats = np.where(devices > 0, slow[None, :], 0.0).max(axis=1) / stages
        return found


def _templates(rows: Sequence[Shapes], chosen: Collection[int]) -> list[Template]:
    """Of some rows, counted through all sizes of micro-batches."""
    starts = np.cumsum([0, *map(len, rows)])
    made: dict[int, list[Template]] = {}
    for start, part in zip(starts.tolist(), rows, strict=False):
        numbers = [row for row in chosen if start <= row < start + len(part)]
        made.update(zip(numbers, part.templates(number - start for number in numbers), strict=True))
    return list(dict.fromkeys(template for row in chosen for template in made[row]))


def _first(rows: Ints, value: Floats, count: int) -> list[int]:
    """Those with the largest values."""
    order = np.argsort(-value[rows], kind="stable")[:count]
    return [int(row) for row in rows[order]]


def together(rows: Sequence[Shapes]) -> tuple[Floats, Floats, Ints, Ints]:
    return (
        np.concatenate([own.longest_s for own in rows]),
        np.concatenate([own.total_s for own in rows]),
        np.concatenate([np.full(len(own), own.micro_batch, dtype=np.int64) for own in rows]),
        np.concatenate([own.devices for own in rows]),
    )

"""Feasibility of a step time for any mix of pipelines: a covering linear program by column generation, with dual prices as the proof.

In T seconds a rank of kind k that does n micro-batches holds at most x layers with n w_k(x) + after_k(x) <= T, wherever in the model
they lie. A pipeline of n micro-batches is a set of ranks that together hold all layers, so its least price, for any prices of devices
and of a pipeline, is a covering problem, solved exactly by dynamic programming over layers. By linear programming duality no mix does
more samples in T than all devices are worth, at prices at which no pipeline does more than it costs. The prices come from columns:
pipelines with a positive reduced value are added until there are none (Gilmore and Gomory, 1961).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import ceil

import numpy as np
from numpy.typing import NDArray

from heterodyne.search.fleet.arrays import Floats, Ints
from heterodyne.search.fleet.counts import Packing
from heterodyne.search.fleet.template_search import NO_TIME_S

__all__ = ["Covering", "Places"]

_COLUMNS = 4  # that are added at once
_ROUNDS = 40
_SLACK = 1e-9


@dataclass(frozen=True, kw_only=True)
class Places:
    """What a pipeline rank can be, by kind and by the number of inner layers that it holds, for a number of replicas.

    Args:
        size: of micro-batches. ``kinds``: indices of the kinds.
        seconds, after_s: of a micro-batch, and of sync and update: with the first layer, with neither end, with the last layer. Shape
            [3, kinds, inner layers + 1].
        whole_s, after_whole_s: with all layers. Shape [kinds].
    """

    size: int
    kinds: Ints
    seconds: Floats
    sync_and_update_s: Floats
    whole_s: Floats
    after_whole_s: Floats


@dataclass(frozen=True, kw_only=True)
class _Pipelines:
    """Pipelines that are possible in some time: rows with one number of micro-batches each, and the most layers a rank of each kind holds.

    Args:
        samples: Shape [rows].
        most: inner layers beside the first layer, beside neither end, beside the last one; -1: not even none. Shape [3, rows, kinds].
        whole: where a rank holds all layers. Shape [rows, kinds].
        layers: number of inner layers of the model.
    """

    samples: Ints
    most: Ints
    whole: NDArray[np.bool_]
    layers: int

    def within(self, which: NDArray[np.bool_]) -> _Pipelines:
        """Some of them."""
        return replace(self, samples=self.samples[which], most=self.most[:, which], whole=self.whole[which])

    def could(self, price: Floats, more: float) -> Floats:
        """Upper bound on samples per price, with fractional ranks. ``more``: the price of a pipeline beside its ranks."""
        layers = self.most.max(axis=0)
        each = np.where(layers > 0, price / np.maximum(1, layers), np.inf).min(axis=1)
        found: Floats = self.samples / np.maximum(each * self.layers + more, 1e-300)
        return found


@dataclass(frozen=True, kw_only=True)
class Covering:
    """Column generation for one fleet and batch.

    Args:
        devices: of a rank of each kind, the pool and the number of devices.
        room: devices of each pool.
        layers: number of inner layers of the model.
    """

    devices: Sequence[tuple[int, int]]
    room: Ints
    batch: int
    layers: int

    def could(self, places: Sequence[Places], most: int, seconds: float, prices: Floats) -> tuple[bool, Floats]:
        """Whether at most ``most`` pipelines, fractional ones included, do the batch in a time; with dual prices as the proof if not."""
        rows = self._pipelines(places, seconds)
        batch = self.batch
        pool, devices = np.array(self.devices).T
        room = np.append(self.room.astype(float), float(most))
        packing = Packing(room)
        for _ in range(_ROUNDS):
            price = prices[:-1][pool] * devices
            # As much as pipelines of a row have to be worth for all of them to do the batch.
            enough = batch * (1 - _SLACK) / max(float(prices @ room), 1e-300)
            own = rows.within(rows.could(price, float(prices[-1])) >= enough)
            if not len(own.samples):
                return False, prices
            least, patterns = self._least(own, price)
            cost = np.maximum(least + prices[-1], 1e-300)
            worth = np.where(np.isfinite(least), own.samples / cost, 0.0)
            if float(worth.max()) < enough:
                return False, prices
            best = np.argsort(-worth, kind="stable")[:_COLUMNS]
            if packing.columns and worth[best[0]] <= 1 + _SLACK:
                return True, prices
            best = best[worth[best] > 0]
            used = np.zeros((len(room), len(best)))
            used[-1] = 1.0
            for column, row in enumerate(best.tolist()):
                for kind in patterns(row):
                    used[pool[kind], column] += devices[kind]
            packing.add(own.samples[best].astype(float), used)
            samples, found = packing.most()
            if found is None or samples >= batch:
                return True, prices
            prices = found
        return True, prices

    def _pipelines(self, places: Sequence[Places], seconds: float) -> _Pipelines:
        """Rows for each number of micro-batches at which the most layers of some rank change."""
        batch, count = self.batch, len(self.devices)
        samples: list[Ints] = []
        most: list[Ints] = []
        whole: list[NDArray[np.bool_]] = []
        for own in places:
            last = ceil(batch / own.size)
            done = _rounds(seconds - own.sync_and_update_s, own.seconds, last)
            alone = _rounds(seconds - own.after_whole_s, own.whole_s, last)
            number = np.unique(np.concatenate([done.ravel(), alone]))
            number = number[number > 0]
            layers = np.full((3, len(number), count), -1)
            layers[:, :, own.kinds] = (done[:, None] >= number[None, :, None, None]).sum(axis=-1) - 1
            all_of = np.zeros((len(number), count), dtype=bool)
            all_of[:, own.kinds] = alone >= number[:, None]
            samples.append(np.minimum(batch, number * own.size))
            most.append(layers)
            whole.append(all_of)
        return _Pipelines(
            samples=np.concatenate(samples),
            most=np.concatenate(most, axis=1),
            whole=np.concatenate(whole),
            layers=self.layers,
        )

    def _least(self, rows: _Pipelines, price: Floats) -> tuple[Floats, Callable[[int], list[int]]]:
        """The least price of a pipeline of each row, and the kinds of its ranks. ``price``: of a rank of each kind."""
        layers = rows.layers
        first, inner, last = rows.most
        every = np.arange(len(rows.samples))[:, None]
        reached = np.full((len(every), layers + 1), np.inf)
        reached[:, 0] = 0.0
        items, taken = list(self._items()), []
        for kind, count in items:
            holds = count * np.maximum(0, inner[:, kind, None])
            ways = reached[every, np.maximum(0, np.arange(layers + 1) - holds)] + count * price[kind]
            taken.append((ways < reached) & (holds > 0))
            reached = np.where(taken[-1], ways, reached)
        alone = np.where(rows.whole, price, np.inf)
        found, ends = alone.min(axis=1), np.stack([alone.argmin(axis=1), np.full(len(every), -1)])
        for kind, own in enumerate(price.tolist()):
            behind = np.clip(layers - first[:, kind, None] - last, 0, layers)
            ways = np.where((first[:, kind, None] >= 0) & (last >= 0), reached[every, behind] + price, np.inf)
            other = ways.argmin(axis=1)
            least = ways[every[:, 0], other] + own
            better = least < found
            found = np.where(better, least, found)
            ends = np.where(better, np.stack([np.full(len(every), kind), other]), ends)

        def pattern(row: int) -> list[int]:
            one, two = ends[:, row].tolist()
            if two < 0:
                return [one]
            chosen, left = [one, two], max(0, layers - int(first[row, one]) - int(last[row, two]))
            for (kind, count), took in zip(items[::-1], taken[::-1], strict=True):
                if took[row, left]:
                    chosen += [kind] * count
                    left = max(0, left - count * int(inner[row, kind]))
            return chosen

        return found, pattern

    def _items(self) -> Iterator[tuple[int, int]]:
        """Counts of ranks of one kind whose sums are all numbers for which there are devices (binary splitting)."""
        for kind, (pool, devices) in enumerate(self.devices):
            left, count = int(self.room[pool]) // devices, 1
            while left:
                yield kind, min(count, left)
                left -= min(count, left)
                count *= 2


def _rounds(seconds: Floats, each_s: Floats, most: int) -> Ints:
    """The number of micro-batches that are done in a time, at most ``most``."""
    could = np.maximum(0.0, seconds) / np.maximum(each_s, NO_TIME_S) * (1 + _SLACK)
    found: Ints = np.minimum(could, most).astype(np.int64)
    return found

"""What no plan can beat, with whole layers, whole micro-batches, and what of its exchange each place shows.

In T seconds a place of kind k that does n micro-batches holds at most x layers with n w_k(x) + after_k(x) <= T, wherever in the model they
lie. A pipeline of n micro-batches is a set of such places that has all layers, so its least price, for any prices of devices and of a
pipeline, is a covering problem, solved exactly by going through the layers. By the duality of linear programming no mix does more samples
in T than all devices are worth, at prices at which no pipeline does more than it costs. The prices come from columns: the pipelines that
do most beyond their price are added until there are none (Gilmore and Gomory, 1961).

It holds for stages of one place that are apart, too. Not counted are waiting, and messages that no device waits for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import ceil, inf

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linprog

from heterodyne.cost.layers import Widths
from heterodyne.predictor.constants import constants
from heterodyne.predictor.overlap import exposed_s, returned_s
from heterodyne.search.fleet.arrays import Floats, Ints
from heterodyne.search.fleet.counts import Limits
from heterodyne.search.fleet.kinds import Kind
from heterodyne.search.fleet.rows import Rows
from heterodyne.search.fleet.sent import EXCHANGED, Exchanged
from heterodyne.search.fleet.weighed import Weighed
from heterodyne.search.fleet.wires import Wires

__all__ = ["Cover"]

_CLOSE = 5e-3  # of a time, the part to which the bound is known
_COLUMNS = 4  # that are added at once
_ROUNDS = 40
_SLACK = 1e-9
_NO_TIME_S = 1e-12  # of a place that has no layers


@dataclass(frozen=True, kw_only=True)
class _Places:
    """What a place can be, by kind and by the layers in the middle of the model that it holds, for a number of replicas.

    Args:
        size: of micro-batches. ``kinds``: numbers of those that there are.
        seconds, after_s: of a micro-batch, and of what comes after all of them: with the first layer, with neither end, with the last
            layer. Shape [3, kinds, layers in the middle + 1].
        whole_s, after_whole_s: with all layers. Shape [kinds].
    """

    size: int
    kinds: Ints
    seconds: Floats
    after_s: Floats
    whole_s: Floats
    after_whole_s: Floats


@dataclass(frozen=True, kw_only=True)
class _Pipelines:
    """What pipelines can be in some time: rows of as many micro-batches, each with what a place of each kind holds at most.

    Args:
        samples: Shape [rows].
        most: layers in the middle beside the first layer, beside neither end, beside the last one; -1: not even none. Shape
            [3, rows, kinds].
        whole: where a place has all layers. Shape [rows, kinds].
        layers: in the middle of the model.
    """

    samples: Ints
    most: Ints
    whole: NDArray[np.bool_]
    layers: int

    def within(self, which: NDArray[np.bool_]) -> _Pipelines:
        """Some of them."""
        return replace(self, samples=self.samples[which], most=self.most[:, which], whole=self.whole[which])

    def could(self, price: Floats, more: float) -> Floats:
        """Samples for what a pipeline costs, at most: as if places came in fractions. ``more``: what it costs beside its places."""
        layers = self.most.max(axis=0)
        each = np.where(layers > 0, price / np.maximum(1, layers), np.inf).min(axis=1)
        found: Floats = self.samples / np.maximum(each * self.layers + more, 1e-300)
        return found


@dataclass(frozen=True, kw_only=True)
class Cover:
    """Of a space and limits without a budget, for a model whose layers between the first and the last one are alike."""

    rows: Rows
    limits: Limits
    _names: dict[tuple[int, Widths], int] = field(default_factory=dict, repr=False)
    _devices: list[tuple[int, int]] = field(default_factory=list, repr=False)

    @classmethod
    def of(cls, rows: Rows, limits: Limits) -> Cover | None:
        """None where it cannot be said."""
        layers = rows.predictor.tables.costs.layers
        if len(layers) < 3 or len(set(layers[1:-1])) > 1 or np.isfinite(limits.budget):
            return None
        found = cls(rows=rows, limits=limits)
        for size in rows.sizes:
            for kind in rows.kinds(size):
                if (kind.pool, kind.widths) not in found._names:
                    found._names[kind.pool, kind.widths] = len(found._names)
                    found._devices.append((kind.pool, kind.devices))
        return found if found._names else None

    def bound_s(self, known: Weighed) -> float:
        """Seconds that no step takes less than; at most those of a plan that is known.

        The fewer replicas, the less they exchange, and the more of the state each holds: so it is asked by the number of pipelines.
        """
        bound_s = known.predicted.step_s
        most = int(self.limits.room.sum())
        most = min(most, self.limits.most or most)
        spans = [(1, 1), *((2**n + 1, 2 ** (n + 1)) for n in range(most.bit_length()))]
        spans = [(first, min(most, last)) for first, last in spans if first <= most and last >= self.limits.least]
        # First as many as are known to be good, since of all others no less need be shown than of these.
        spans.sort(key=lambda span: known.plan.pipelines not in range(span[0], span[1] + 1))
        prices = np.full(len(self.limits.room) + 1, 1.0)
        for first, last in spans:
            bound_s, prices = self._of_replicas(first, last, bound_s, prices)
        return bound_s

    def _of_replicas(self, first: int, last: int, known_s: float, prices: Floats) -> tuple[float, Floats]:
        """For so many pipelines; and the last prices, from which others may begin."""
        places = [self._places(size, first, last) for size in self.rows.sizes if self.rows.kinds(size)]
        could, prices = self._could(places, last, known_s, prices)
        if not could:
            return known_s, prices
        low, high = 0.0, known_s
        step = _CLOSE
        while high - low > _CLOSE * high:
            # Rarely far below what is known, so in steps that become longer.
            tried = max((low + high) / 2, high * (1 - step)) if low else high * (1 - step)
            step = min(0.5, 4 * step)
            could, prices = self._could(places, last, tried, prices)
            low, high = (low, tried) if could else (tried, high)
        return low, prices

    def _places(self, size: int, first: int, last: int) -> _Places:
        kinds = self.rows.kinds(size)
        layers = len(kinds[0].table.costs)
        inner = np.arange(layers - 1)
        starts = np.concatenate([0 * inner, 0 * inner + 1, layers - 1 - inner, [0]])
        stops = np.concatenate([inner + 1, inner + 1, 0 * inner + layers, [layers]])
        own = np.array([self._place(kind, starts, stops, first, last) for kind in kinds]).transpose(1, 0, 2)
        (seconds, after_s), (whole_s, after_whole_s) = own[..., :-1], own[..., -1]
        shape = len(kinds), 3, len(inner)
        return _Places(
            size=size,
            kinds=np.array([self._names[kind.pool, kind.widths] for kind in kinds]),
            seconds=seconds.reshape(shape).swapaxes(0, 1),
            after_s=after_s.reshape(shape).swapaxes(0, 1),
            whole_s=whole_s,
            after_whole_s=after_whole_s,
        )

    def _place(self, kind: Kind, start: Ints, stop: Ints, first: int, last: int) -> tuple[Floats, Floats]:
        """Seconds of a micro-batch at the level at which they are least, infinite where nothing fits, and after all of them."""
        table, predictor, space = kind.table, self.rows.predictor, self.rows.space
        forward, backward = (own[stop] - own[start] for own in table.passes)
        shared = first * kind.widths.copies > 1
        gradients, updated, parameters = (self._exchanged_s(kind, what, start, stop, first) for what in EXCHANGED)
        found = np.full(start.shape, np.inf)
        for zero in dict.fromkeys((self.rows.low, *self.rows.high)):
            level = zero if last * kind.widths.copies > 1 else 0
            # Of layers that are apart only one is whole at a time, not two neighbours.
            apart = float(max(c.gradient_bytes + c.parameter_bytes for c in table.costs)) if level > 1 else 0.0
            fits, again = (
                table.most_held(level, last, kind.memory_bytes + apart, recompute=recompute)[start, stop] >= 1
                for recompute in (False, space.recompute)
            )
            beside = (gradients if level > 1 else 0.0) + (parameters if level > 2 else 0.0)
            ahead = np.maximum(forward, parameters) if level > 2 else forward
            plain, more = (ahead + np.maximum(own, beside) for own in (backward, backward + forward))
            found = np.minimum(found, np.where(fits, plain, np.where(again, more, np.inf)))
        if predictor.blocking:
            # An end of a pipeline sends a message for each micro-batch, all other places two; who has all layers sends none.
            messages = 2 - (start == 0) - (stop == len(table.costs))
            found = np.where(messages > 0, found + messages * self._send_s(kind), found)
        whole, own = table.updates_s(start, stop)
        stated, hidden_by = constants().stated, backward + forward
        after = np.full(start.shape, np.inf)
        if not shared or 0 in space.zero:
            reduced = 2 * gradients
            after = (exposed_s(reduced, hidden_by, stated) if predictor.overlap else reduced) + whole
        if shared and max(space.zero) > 0:
            back = returned_s(updated, stated) if predictor.overlap else updated
            scattered = exposed_s(gradients, hidden_by, stated) if predictor.overlap else gradients
            after = np.minimum(after, scattered + back + own / last)
        return found, after

    def _exchanged_s(self, kind: Kind, what: Exchanged, start: Ints, stop: Ints, replicas: int) -> Floats:
        """Once round, at least."""
        device, dense, _ = kind.table.exchanged(what).carried(replicas)
        own, copy = device[stop] - device[start], dense[stop] - dense[start]
        inside, outside = self.rows.predictor.network.least_s_per_byte(kind.name, kind.widths, replicas)
        rates = [(inside, own), (outside, np.maximum(copy, own))]
        known = [rate * size for rate, size in rates if rate < inf]
        return np.minimum.reduce(known) if known else np.where(own > 0, np.inf, 0.0)

    def _send_s(self, kind: Kind) -> float:
        """Of a message to any other place."""
        fleet = self.rows.predictor.fleet
        wires, pool = Wires(fleet), fleet.pools[kind.pool]
        sent = min(kind.table.output_bytes(stop) for stop in range(1, len(kind.table.costs)))
        ways = [(wire, 1.0) for other in fleet.pools if (wire := wires.between(pool.name, other.name)) is not None]
        ways = [(wire, max(1.0, kind.devices / pool.devices_per_node)) for wire, _ in ways]
        inside = wires.inside(pool)
        ways += [] if inside is None else [(inside, float(kind.widths.copies))]
        return min((wire.latency_s + sent / wire.bandwidth_bytes_per_s / part for wire, part in ways), default=inf)

    def _could(self, places: Sequence[_Places], most: int, seconds: float, prices: Floats) -> tuple[bool, Floats]:
        """Whether so many pipelines, and fractions of them, do the batch in a time; with prices that say so if not."""
        rows = self._pipelines(places, seconds)
        batch = self.rows.predictor.global_batch
        pool, devices = np.array(self._devices).T
        room = np.append(self.limits.room.astype(float), float(most))
        left: list[Floats] = []
        right: list[float] = []
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
            if left and worth[best[0]] <= 1 + _SLACK:
                return True, prices
            for row in (row for row in best.tolist() if worth[row] > 0):
                used = np.zeros(len(room))
                used[-1] = 1.0
                for kind in patterns(row):
                    used[pool[kind]] += devices[kind]
                left.append(-used)
                right.append(-float(own.samples[row]))
            found = linprog(room, A_ub=np.array(left), b_ub=np.array(right), bounds=(0, None), method="highs")
            if found.status != 0 or float(found.fun or 0.0) >= batch:
                return True, prices
            prices = np.asarray(found.x, float)
        return True, prices

    def _pipelines(self, places: Sequence[_Places], seconds: float) -> _Pipelines:
        """With the numbers of micro-batches of which more could not be done by places with as many layers."""
        batch, count = self.rows.predictor.global_batch, len(self._devices)
        samples: list[Ints] = []
        most: list[Ints] = []
        whole: list[NDArray[np.bool_]] = []
        for own in places:
            last = ceil(batch / own.size)
            done = _rounds(seconds - own.after_s, own.seconds, last)
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
            layers=len(self.rows.predictor.tables.costs.layers) - 2,
        )

    def _least(self, rows: _Pipelines, price: Floats) -> tuple[Floats, Callable[[int], list[int]]]:
        """The least price of a pipeline of each row, and the kinds of its places. ``price``: of a place of each kind."""
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
        """So many places of a kind at once that their sums are all numbers for which there are devices, and no more."""
        for kind, (pool, devices) in enumerate(self._devices):
            left, count = int(self.limits.room[pool]) // devices, 1
            while left:
                yield kind, min(count, left)
                left -= min(count, left)
                count *= 2


def _rounds(seconds: Floats, each_s: Floats, most: int) -> Ints:
    """Micro-batches that are done in a time, up to a number."""
    could = np.maximum(0.0, seconds) / np.maximum(each_s, _NO_TIME_S) * (1 + _SLACK)
    found: Ints = np.minimum(could, most).astype(np.int64)
    return found

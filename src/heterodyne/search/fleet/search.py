"""The search for the best plan over a fleet.

1. For every size of micro-batch, and for optimizer states in more and more parts: the shapes of pipelines that fit (`shapes`).
2. The relaxed knapsack over them says what no plan can beat; where that is no better than a plan that is known, nothing more is done.
3. Counts of the shapes that matter, as whole numbers, at times between what cannot be beaten and what is known (`counts`).
4. The best of these mixes are played, and improved step by step (`improve`).

Steps 1 to 3 find cuts and counts that are best for slowest stages; played time is what plans are compared by, always.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import inf
from time import monotonic

import numpy as np

from heterodyne.cluster.fleet import Fleet
from heterodyne.search.fleet.counts import Ints, Limits, best_per_devices, capacities, relaxed, shortest_s, whole
from heterodyne.search.fleet.improve import Steps, climb
from heterodyne.search.fleet.plan import Layout, ScheduleName, Template
from heterodyne.search.fleet.predict import Mix, Predictor, Weighed, mix_of
from heterodyne.search.fleet.shapes import Shapes, shapes
from heterodyne.search.fleet.space import Space
from heterodyne.search.fleet.tables import Floats, Tables

__all__ = ["Search"]

_BISECTIONS = 4
_SOONER = 0.9995
_FEW_DEVICES = 16
_SHARDS = (1, 2, 3, 4, 6, 8, 16)  # of the optimizer state
_SHARDS_OF_MANY = (1, 8, 64)  # beyond, what is left of it hardly matters
_STARTS = 3  # mixes that are improved
_ALONE = 3  # shapes for each number of pipelines that are all alike
_ONE_BY_ONE = 8  # numbers of pipelines up to which every number is tried
_PLAYED_STAGES = 500  # at most, for one list of mixes
_PLAYED = 60  # mixes of whole counts that are played, those with the best bounds first
Score = Callable[[Weighed], float]


@dataclass(kw_only=True)
class Search:
    """Searches one space for one model, fleet and global batch. Keeps all that it weighed.

    Args:
        deadline_s: on `time.monotonic`'s clock; the best that is known by then is the result.
    """

    predictor: Predictor
    space: Space
    deadline_s: float | None = None
    weighed: dict[Mix, Weighed] = field(default_factory=dict)
    bound_s: float = inf
    stopped: bool = False
    _shapes: dict[tuple[int, int], Shapes | None] = field(default_factory=dict)
    _once: dict[Template, float] = field(default_factory=dict)
    _work: int = 0

    @property
    def fleet(self) -> Fleet:
        return self.predictor.fleet

    @property
    def tables(self) -> Tables:
        return self.predictor.tables

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Of micro-batches, those of which something is known."""
        most = self.predictor.global_batch
        wanted = self.space.micro_batches or tuple(2**n for n in range(most.bit_length()))
        kinds = {(pool.kind, width) for pool in self.fleet.pools for width in self.tables.costs.widths(pool.kind)}
        known = [
            size
            for size in wanted
            if size <= most and any(self.tables.table(kind, width, size) is not None for kind, width in sorted(kinds))
        ]
        return tuple(sorted(known))

    def run(
        self, score: Score, *, prices: Floats | None = None, budget: float = inf, by_time: bool = True
    ) -> Weighed | None:
        """The best by a score among plans within a budget; None if nothing fits.

        ``prices``: of a device of each pool; ``by_time``: the score is the step's seconds, so that bounds on them rule plans out.
        """
        best: Weighed | None = None
        columns: dict[Template, None] = {}
        for shards in self._levels():
            if self._late():
                break
            limits = self._limits(shards, prices, budget)
            rows = self._rows(shards)
            times = self._times(rows, limits)
            if times is None:
                continue
            self.bound_s = min(self.bound_s, times[0])
            if best is not None and by_time and times[0] >= best.predicted.step_s:
                continue  # no plan with these shapes is faster
            columns.update(dict.fromkeys(self._columns(rows, limits, times[1])))
            own = list(columns)
            best = self._played(self._alike(own, limits), best, score, prices, budget, by_time)
            known_s = 1e3 * times[1] if best is None else best.predicted.step_s
            own = self._worth_most(own, limits, known_s)
            mixes = list(dict.fromkeys(self._unlike(own, limits, times[0], known_s)))
            best = self._played(mixes, best, score, prices, budget, by_time)
            if best is not None:
                pairs = self._pairs(own, limits, best.predicted.step_s)
                best = self._played(pairs, best, score, prices, budget, by_time)
        return best if best is None else self._improved(best, list(columns), score, prices, budget, by_time)

    def weigh(self, mix: Mix, below_s: float = inf) -> Weighed | None:
        """The best way to run these pipelines: every layout and schedule of the space that makes a difference.

        None if they do not fit, or where their bound is no shorter than ``below_s``.
        """
        if mix in self.weighed:
            return self.weighed[mix]
        deep = any(len(template.stages) > 1 for template, _ in mix)
        self._work += sum(4 + len(t.stages) + len(t.stages) ** 2 // 16 for t, _ in mix)
        options: list[Weighed | None] = []
        for schedule in self.space.schedules if deep else self.space.schedules[:1]:
            for layout in self.space.layouts if deep else self.space.layouts[:1]:
                if not any(option is not None and self._no_faster(option, schedule, layout) for option in options):
                    options.append(
                        self.predictor.weigh(
                            mix,
                            schedule=schedule,
                            layout=layout,
                            shard_optimizer=self.space.shard_optimizer,
                            below_s=below_s,
                        )
                    )
        known = [option for option in options if option is not None]
        if not known:
            return None
        best = min(known, key=lambda option: option.predicted.step_s)
        self.weighed[mix] = best
        return best

    def _no_faster(self, known: Weighed, schedule: ScheduleName, layout: Layout) -> bool:
        """Whether these very pipelines and shares take as long with another schedule in the same layout."""
        if known.plan.schedule == schedule or known.plan.layout != layout:
            return False
        return all(
            self.predictor.makespans(group.template, schedule, layout).seconds(group.num_microbatches)
            >= self.predictor.makespans(group.template, known.plan.schedule, layout).seconds(group.num_microbatches)
            for group in known.plan.groups
        )

    def _levels(self) -> list[int]:
        """In how many parts the optimizer state may be: only as many as help."""
        most = min(self.fleet.devices, self.space.max_pipelines or self.fleet.devices)
        if not self.space.shard_optimizer or most < 2:
            return [1]
        levels = [n for n in (_SHARDS if most <= _FEW_DEVICES else _SHARDS_OF_MANY) if n <= most]
        return levels[:1] if _same(self._rows(1), self._rows(levels[-1])) else levels

    def _limits(self, shards: int, prices: Floats | None, budget: float) -> Limits:
        room = np.array([pool.devices for pool in self.fleet.pools], dtype=np.int64)
        return Limits(room=room, prices=prices, budget=budget, least=shards, most=self.space.max_pipelines)

    def _rows(self, shards: int) -> list[Shapes]:
        for size in self.sizes:
            if (size, shards) not in self._shapes:
                self._shapes[size, shards] = shapes(
                    self.fleet,
                    self.tables,
                    micro_batch=size,
                    global_batch=self.predictor.global_batch,
                    shards=shards,
                    space=self.space,
                )
        found = [self._shapes[size, shards] for size in self.sizes]
        return [rows for rows in found if rows is not None]

    def _times(self, rows: Sequence[Shapes], limits: Limits) -> tuple[float, float] | None:
        if not rows:
            return None
        longest, total, sizes, devices = _together(rows)
        return shortest_s(longest, total, sizes, devices, limits, self.predictor.global_batch)

    def _columns(self, rows: Sequence[Shapes], limits: Limits, seconds: float) -> list[Template]:
        """The shapes that are worth most at a time: without an exchange of gradients, and with about what it takes."""
        longest, total, sizes, devices = _together(rows)
        chosen: dict[int, None] = {}
        several = self.space.columns // 4
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
        starts = np.cumsum([0, *map(len, rows)])
        made: list[Template] = []
        for row in chosen:
            part = int(np.searchsorted(starts, row, side="right")) - 1
            made += rows[part].templates(row - int(starts[part]))
        return list(dict.fromkeys(made))

    def _alone(self, longest: Floats, total: Floats, sizes: Ints, devices: Ints, limits: Limits) -> list[int]:
        """The shapes that do the whole batch fastest in so many pipelines all alike."""
        most = np.min(np.where(devices > 0, limits.room // np.maximum(1, devices), limits.room.max()), axis=1)
        exchange_s = self._exchange_s(devices)
        found: dict[int, None] = {}
        count = limits.least
        while count <= min(int(most.max()), limits.most or count):
            fits = np.flatnonzero(most >= count)
            rounds: Floats = np.ceil(self.predictor.global_batch / (sizes[fits] * count))
            step_s = total[fits] + (rounds - 1) * longest[fits] + (exchange_s[fits] if count > 1 else 0.0)
            best = fits[np.argsort(step_s, kind="stable")[:_ALONE]]
            found.update(dict.fromkeys(best.tolist()))
            count = count + 1 if count < _ONE_BY_ONE else 2 * count
        return list(found)

    def _exchange_s(self, devices: Ints) -> Floats:
        """About what the gradients take of pipelines over so many devices: each node of a pipeline has its part of the layers."""
        table = next(
            table
            for pool in self.fleet.pools
            for width in self.tables.costs.widths(pool.kind)
            for size in self.sizes
            if (table := self.tables.table(pool.kind, width, size)) is not None
        )
        size = table.reduced_bytes(0, len(table.costs))
        wires = [self.fleet.wire(pool, pool) for pool in self.fleet.pools]
        slow = np.array([0.0 if wire is None else 2 * size / wire.bandwidth_bytes_per_s for wire in wires])
        stages = np.maximum(1, devices.sum(axis=1))
        found: Floats = np.where(devices > 0, slow[None, :], 0.0).max(axis=1) / stages
        return found

    def _devices(self, columns: Sequence[Template]) -> Ints:
        return np.array([[t.devices.get(pool.name, 0) for pool in self.fleet.pools] for t in columns], dtype=np.int64)

    def _alike(self, columns: Sequence[Template], limits: Limits) -> list[Mix]:
        """Every column by itself, so many times."""
        devices = self._devices(columns)
        found: dict[Mix, None] = {}
        for template, own in zip(columns, devices, strict=True):
            most = limits.most_of(own)
            for count in {*range(1, min(most, _ONE_BY_ONE) + 1), most // 2, most - 1, most}:
                if limits.least <= count <= most and count > 0:
                    found[mix_of([(template, count)])] = None
        return list(found)

    def _unlike(self, columns: Sequence[Template], limits: Limits, bound_s: float, known_s: float) -> Iterator[Mix]:
        """Whole counts of all columns together that could be done before a time that is known."""
        devices = self._devices(columns)
        full = self._once_s(columns)
        for part in (0.0, 1.0):
            once = [part * seconds for seconds in full]
            yield from self._bisected(columns, devices, once, limits, (bound_s, known_s))

    def _worth_most(self, columns: Sequence[Template], limits: Limits, seconds: float) -> list[Template]:
        """Those that a mixed integer program is asked about: what they do in a time is worth most."""
        devices = self._devices(columns)
        layout = self.space.layouts[-1]
        capacity = np.array(
            [
                t.micro_batch
                * self.predictor.makespans(t, "1F1B", layout).most_bound(
                    seconds, self.predictor.most_micro_batches(t, "1F1B", limits.least)
                )
                for t in columns
            ],
            dtype=float,
        )
        known = relaxed(capacity, devices, limits)
        if known is None:
            return list(columns[: self.space.columns])
        worth = capacity - devices @ known.prices
        kept = np.sort(np.argsort(-worth, kind="stable")[: self.space.columns])
        return [columns[int(number)] for number in kept]

    def _pairs(self, columns: Sequence[Template], limits: Limits, known_s: float) -> list[Mix]:
        """Mixes of two columns that could be done in a time, those first that could do most.

        A mixed integer program names one mix for a time; where the exchange of gradients decides, the best is one of the others.
        """
        devices = self._devices(columns)
        once = self._once_s(columns)
        items = []
        for number, (template, own) in enumerate(zip(columns, devices, strict=True)):
            most = limits.most_of(own)
            counts = sorted({*range(1, min(most, _ONE_BY_ONE) + 1), *(most * n // 8 for n in range(1, 9))} - {0})
            played = self.predictor.makespans(template, "1F1B", self.space.layouts[-1])
            top = self.predictor.most_micro_batches(template, "1F1B", limits.least)
            done = [template.micro_batch * played.most_bound(known_s - part * once[number], top) for part in (0.0, 0.5)]
            items += [(number, count, count * done[0], count * done[1]) for count in counts]
        column, count, could, does = (np.array([item[n] for item in items]) for n in range(4))
        need = devices[column] * count[:, None]
        fits = np.all(need[:, None, :] + need[None, :, :] <= limits.room, axis=2)
        fits &= could[:, None] + could[None, :] >= self.predictor.global_batch
        fits &= (column[:, None] < column[None, :]) & (count[:, None] + count[None, :] >= limits.least)
        if limits.most is not None:
            fits &= count[:, None] + count[None, :] <= limits.most
        a, b = np.nonzero(fits)
        order = np.argsort(-(does[a] + does[b]), kind="stable")[:_PLAYED]
        return [
            mix_of([(columns[column[i]], int(count[i])), (columns[column[j]], int(count[j]))])
            for i, j in zip(a[order], b[order], strict=True)
        ]

    def _bisected(
        self,
        columns: Sequence[Template],
        devices: Ints,
        once: Sequence[float],
        limits: Limits,
        times: tuple[float, float],
    ) -> Iterator[Mix]:
        """Mixes that do most in times that come near the one in which the batch is just done. ``once``: seconds of each column that
        no micro-batch is done in.
        """
        played = [self.predictor.makespans(t, "1F1B", self.space.layouts[-1]) for t in columns]
        most = [self.predictor.most_micro_batches(t, "1F1B", limits.least) for t in columns]
        low, high = times
        at_s = high * _SOONER
        for _ in range(_BISECTIONS):
            capacity = [
                t.micro_batch * own.most_bound(at_s - extra, top)
                for t, own, extra, top in zip(columns, played, once, most, strict=True)
            ]
            counts = whole(capacity, devices, limits)
            if counts is None:
                return
            mix = mix_of((t, n) for t, n in zip(columns, counts, strict=True))
            if mix:
                yield mix
            if sum(c * n for c, n in zip(capacity, counts, strict=True)) >= self.predictor.global_batch:
                high = at_s
            elif high == times[1]:
                return
            else:
                low = at_s
            at_s = (low + high) / 2

    def _once_s(self, columns: Sequence[Template]) -> list[float]:
        """About what the gradients take of each column beside others like it, in the better layout."""
        found = []
        for template in columns:
            if template not in self._once:
                tables = {template: self.predictor.stage_tables(template)}
                most = min(self.fleet.pool(pool).devices // need for pool, need in template.devices.items())
                self._once[template] = min(
                    self.predictor.network.sync([(template, most)], tables, layout).seconds
                    for layout in self.space.layouts
                )
            found.append(self._once[template])
        return found

    def _played(
        self,
        mixes: Sequence[Mix],
        best: Weighed | None,
        score: Score,
        prices: Floats | None,
        budget: float,
        by_time: bool,
    ) -> Weighed | None:
        """The best of them, and of what is known already. Where it is not time that counts, bounds only say what comes first."""
        ranked = sorted(((self.predictor.bound_s(mix), n) for n, mix in enumerate(mixes)))
        limit = self._work + _PLAYED_STAGES
        for bound_s, number in ranked[:_PLAYED]:
            if (
                self._late()
                or self._work > limit
                or (by_time and best is not None and bound_s >= best.predicted.step_s)
            ):
                break
            if not self._within(mixes[number], prices, budget):
                continue
            weighed = self.weigh(mixes[number], best.predicted.step_s if by_time and best is not None else inf)
            if weighed is not None and (best is None or score(weighed) < score(best)):
                best = weighed
        return best

    def _improved(
        self,
        best: Weighed,
        columns: Sequence[Template],
        score: Score,
        prices: Floats | None,
        budget: float,
        by_time: bool,
    ) -> Weighed:
        steps = Steps(
            predictor=self.predictor,
            columns=columns,
            sizes=self.sizes,
            recompute=self.space.recompute,
            shard_optimizer=self.space.shard_optimizer,
            most_pipelines=self.space.max_pipelines,
            usd=None if prices is None or budget == inf else (self._by_pool(prices), budget),
        )
        within = [(mix, w) for mix, w in self.weighed.items() if self._within(mix, prices, budget)]
        starts = sorted(within, key=lambda entry: score(entry[1]))[:_STARTS]
        limit = self._work
        for mix, start in starts:
            limit += self.space.work // len(starts)

            def could_beat(tried: Mix, least: float) -> bool:
                if not self._within(tried, prices, budget):
                    return False
                return not by_time or self.predictor.could_take(tried, least)

            def proceed(limit: int = limit) -> bool:
                return self._work < limit and not self._late()

            def weigh(tried: Mix, least: float) -> Weighed | None:
                return self.weigh(tried, least if by_time else inf)

            found, _ = climb(start, mix, steps, weigh, score, could_beat, proceed)
            if score(found) < score(best):
                best = found
        return best

    def _within(self, mix: Mix, prices: Floats | None, budget: float) -> bool:
        if prices is None or budget == inf:
            return True
        by_pool = self._by_pool(prices)
        return sum(n * by_pool[p] * d for t, n in mix for p, d in t.devices.items()) <= budget * (1 + 1e-9)

    def _by_pool(self, prices: Floats) -> dict[str, float]:
        return {pool.name: float(price) for pool, price in zip(self.fleet.pools, prices, strict=True)}

    def _late(self) -> bool:
        late = self.deadline_s is not None and monotonic() >= self.deadline_s
        self.stopped = self.stopped or late
        return late


def _same(some: Sequence[Shapes], others: Sequence[Shapes]) -> bool:
    """Whether no shape is faster among the others."""
    return len(some) == len(others) and all(
        np.array_equal(one.longest_s, other.longest_s) for one, other in zip(some, others, strict=True)
    )


def _first(rows: Ints, value: Floats, count: int) -> list[int]:
    """Those with the largest values."""
    order = np.argsort(-value[rows], kind="stable")[:count]
    return [int(row) for row in rows[order]]


def _together(rows: Sequence[Shapes]) -> tuple[Floats, Floats, Ints, Ints]:
    return (
        np.concatenate([own.longest_s for own in rows]),
        np.concatenate([own.total_s for own in rows]),
        np.concatenate([np.full(len(own), own.micro_batch, dtype=np.int64) for own in rows]),
        np.concatenate([own.devices for own in rows]),
    )

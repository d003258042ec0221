"""The search for the best plan over a fleet.

1. For every size of micro-batch, and for more and more state in more and more parts: the shapes of pipelines that fit (`shapes`).
2. The relaxed knapsack over them says what no plan can beat; where that is no better than a plan that is known, nothing more is done.
3. Counts of the shapes that matter, as whole numbers, at times between what cannot be beaten and what is known (`counts`).
4. The best of these mixes are played, and improved step by step (`improve`).

Steps 1 to 3 find cuts and counts that are best for slowest stages; played time is what plans are compared by, always.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import inf
from time import monotonic

import numpy as np

from heterodyne.cluster.fleet import Fleet
from heterodyne.cost.layers import Widths
from heterodyne.search.fleet.columns import Columns, together
from heterodyne.search.fleet.counts import Limits, shortest_s
from heterodyne.search.fleet.improve import Steps, climb
from heterodyne.search.fleet.mixes import Mixes
from heterodyne.search.fleet.plan import Layout, ScheduleName, Template
from heterodyne.search.fleet.predict import Mix, Predictor, Weighed, mix_of
from heterodyne.search.fleet.shapes import Kind, Shapes, Sharing, kinds_of, shapes
from heterodyne.search.fleet.space import Space
from heterodyne.search.fleet.tables import Floats, Tables

__all__ = ["Search"]

_FEW_DEVICES = 16
_SHARDS = (1, 2, 3, 4, 6, 8, 16)  # parts of the state that is shared
_SHARDS_OF_MANY = (1, 8, 64)  # beyond, what is left of it hardly matters
_STARTS = 3  # mixes that are improved
_PLAYED_STAGES = 500  # at most, for one list of mixes
_PLAYED = 60  # mixes of whole counts that are played, those with the best bounds first
Score = Callable[[Weighed], float]
Levels = tuple[int, ...]


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
    _shapes: dict[tuple[int, Levels, int, int | None], Shapes | None] = field(default_factory=dict)
    _kinds: dict[int, tuple[Kind, ...]] = field(default_factory=dict)
    _work: int = 0

    @property
    def fleet(self) -> Fleet:
        return self.predictor.fleet

    @property
    def tables(self) -> Tables:
        return self.predictor.tables

    @cached_property
    def _chosen(self) -> Columns:
        return Columns(predictor=self.predictor, sizes=self.sizes, most=self.space.columns)

    @cached_property
    def _mixes(self) -> Mixes:
        return Mixes(predictor=self.predictor, space=self.space)

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Of micro-batches, those of which something is known."""
        most = self.predictor.global_batch
        wanted = self.space.micro_batches or tuple(2**n for n in range(most.bit_length()))
        kinds = {(pool.kind, widths) for pool in self.fleet.pools for widths in self.tables.costs.widths(pool.kind)}
        known = [
            size
            for size in wanted
            if size <= most
            and any(
                (table := self.tables.table(kind, widths, size)) is not None and table.may_stand_alone
                for kind, widths in sorted(kinds)
            )
        ]
        return tuple(sorted(known))

    def run(
        self, score: Score, *, prices: Floats | None = None, budget: float = inf, by_time: bool = True
    ) -> Weighed | None:
        """The best by a score among plans within a budget; None if nothing fits.

        ``prices``: of a device of each pool; ``by_time``: the score is the step's seconds, so that bounds on them rule plans out.
        """
        # Whatever fits does so at some level, with state in as many parts as there can be pipelines.
        anyhow = [self._times(rows, self._limits(1, prices, budget)) for rows in self._anyhow()]
        self.bound_s = min(self.bound_s, *(inf if times is None else times[0] for times in anyhow))
        best: Weighed | None = None
        columns: dict[Template, None] = {}
        about_s = inf
        for zero, shards in self._levels():
            if self._late():
                break
            limits = self._limits(shards, prices, budget)
            if max(zero) > 1 and self.fleet.devices > _FEW_DEVICES:
                # Over many devices, where whole numbers hardly matter: with so much exchanged it is no faster in any number of parts.
                soonest = self._times(self._rows(self._high, self._most_pipelines, least=shards), limits)
                if soonest is None or soonest[1] >= about_s:
                    break
            rows = self._rows(zero, shards, least=shards)
            times = self._times(rows, limits)
            if times is None:
                continue
            about_s = min(about_s, times[1])
            if best is not None and by_time and times[0] >= best.predicted.step_s:
                continue  # no plan with these shapes is faster
            columns.update(dict.fromkeys(self._chosen.of(rows, limits, times[1])))
            own = list(columns)
            best = self._played(self._mixes.alike(own, limits), best, score, prices, budget, by_time)
            known_s = 1e3 * times[1] if best is None else best.predicted.step_s
            own = self._mixes.worth_most(own, limits, known_s)
            mixes = list(dict.fromkeys(self._mixes.unlike(own, limits, times[0], known_s)))
            best = self._played(mixes, best, score, prices, budget, by_time)
            if best is not None:
                pairs = self._mixes.pairs(own, limits, best.predicted.step_s)
                best = self._played(pairs, best, score, prices, budget, by_time)
        return best if best is None else self._improved(best, list(columns), score, prices, budget, by_time)

    def alone(self, pool: str, work: int) -> Search:
        """A search of what one pool does, with the shapes that are known of it. ``work``: as in `Space`."""
        number = [own.name for own in self.fleet.pools].index(pool)
        known = {key: None if rows is None else rows.of_pool(number) for key, rows in self._shapes.items()}
        space = replace(self.space, pools=(pool,), work=work)
        return Search(predictor=self.predictor, space=space, deadline_s=self.deadline_s, _shapes=known)

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
                            zero=self.space.zero,
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
        mix = mix_of((group.template, group.replicas) for group in known.plan.groups)
        ours, theirs = (
            self.predictor.played(mix, name, layout, known.plan.zero) for name in (schedule, known.plan.schedule)
        )
        return all(
            ours[group.template].seconds(group.num_microbatches)
            >= theirs[group.template].seconds(group.num_microbatches)
            for group in known.plan.groups
        )

    def _levels(self) -> list[tuple[Levels, int]]:
        """At one of which levels in how many parts state may be: only what helps, what is exchanged least first."""
        most = self._most_pipelines
        found: list[tuple[Levels, int]] = [((self._low,), 1)]
        alone, low, high = self._rows((self._low,), 1, least=1), *self._anyhow()
        copies = any(w.copies > 1 for pool in self.fleet.pools for w in self.tables.costs.widths(pool.kind))
        parts = [n for n in (_SHARDS if most <= _FEW_DEVICES else _SHARDS_OF_MANY) if n <= most and (n > 1 or copies)]
        if not _same(alone, low):
            found += [((self._low,), n) for n in parts]
        if high and not _same(alone, high):
            levels = [self._high] if most > _FEW_DEVICES else [(level,) for level in self._high]
            found += [(own, n) for n in parts for own in levels]
        return found

    def _anyhow(self) -> tuple[list[Shapes], list[Shapes]]:
        """All that fits in any number of pipelines: with little exchanged, and at levels that exchange beside every micro-batch."""
        most = self._most_pipelines
        return self._rows((self._low,), most), self._rows(self._high, most) if self._high else []

    @property
    def _low(self) -> int:
        """1, which fits wherever 0 does; where it may not be, 0, which is all that one pipeline can do."""
        return 1 if 1 in self.space.zero else 0

    @property
    def _high(self) -> Levels:
        """At which something is exchanged beside every micro-batch."""
        return tuple(level for level in self.space.zero if level > 1)

    @property
    def _most_pipelines(self) -> int:
        """That share state."""
        if max(self.space.zero) < 1:
            return 1
        return min(self.fleet.devices, self.space.max_pipelines or self.fleet.devices)

    def _limits(self, shards: int, prices: Floats | None, budget: float) -> Limits:
        room = np.array([pool.devices for pool in self.fleet.pools], dtype=np.int64)
        return Limits(room=room, prices=prices, budget=budget, least=shards, most=self.space.max_pipelines)

    def _rows(self, zero: Levels, shards: int, least: int | None = None) -> list[Shapes]:
        """Of each size of micro-batch (see `Sharing`)."""
        sharing = Sharing(replicas=shards, zero=zero, least=least, network=self.predictor.network)
        for size in self.sizes:
            key = (size, zero, shards, least if max(zero) > 1 else None)
            if key not in self._shapes:
                self._shapes[key] = shapes(
                    self.fleet,
                    self.tables,
                    micro_batch=size,
                    global_batch=self.predictor.global_batch,
                    sharing=sharing,
                    space=self.space,
                )
        found = [self._shapes[size, zero, shards, least if max(zero) > 1 else None] for size in self.sizes]
        return [rows for rows in found if rows is not None]

    def _times(self, rows: Sequence[Shapes], limits: Limits) -> tuple[float, float] | None:
        if not rows:
            return None
        longest, total, sizes, devices = together(rows)
        return shortest_s(longest, total, sizes, devices, limits, self.predictor.global_batch)

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
            widths=self._widths,
            recompute=self.space.recompute,
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

    def _widths(self, pool: str, size: int) -> tuple[Widths, ...]:
        if size not in self._kinds:
            self._kinds[size] = kinds_of(self.fleet, self.tables, size, self.space)
        return tuple(kind.widths for kind in self._kinds[size] if kind.name == pool)

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

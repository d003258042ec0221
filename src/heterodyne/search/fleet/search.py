"""The search for the best plan over a fleet.

1. Pipelines that are all alike are enumerated by an estimate, the best of them cut exactly and played (`alike`, `cut`).
2. A bound that no plan can beat (`cover`, `spread`): where a plan comes near enough to it, nothing more is done.
3. For every size of micro-batch, and for more and more state in more and more parts: the shapes of pipelines that fit (`shapes`). The
   relaxed knapsack over them says which matter.
4. Counts of the shapes that matter, as whole numbers, at times between what cannot be beaten and what is known (`counts`).
5. The best of these mixes are played, and improved step by step (`improve`).
6. Those that would be faster if their pipelines never waited but for their gradients are tried with several stages on each place
   (`chunks`); the best of these are improved likewise.

Steps 1, 3 and 4 find cuts and counts that are best for slowest stages; played time is what plans are compared by, always.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain, islice
from math import inf

import numpy as np

from heterodyne.cluster.fleet import Fleet
from heterodyne.search.fleet.aim import Aim, Score
from heterodyne.search.fleet.alike import Alike
from heterodyne.search.fleet.arrays import Floats
from heterodyne.search.fleet.ascending import ascending
from heterodyne.search.fleet.columns import Columns
from heterodyne.search.fleet.counts import Limits
from heterodyne.search.fleet.cover import Cover
from heterodyne.search.fleet.cut import Cutter
from heterodyne.search.fleet.improve import Steps, climb
from heterodyne.search.fleet.kinds import fastest
from heterodyne.search.fleet.mixes import Mixes
from heterodyne.search.fleet.options import Options, Times
from heterodyne.search.fleet.plan import INTERLEAVED, SPLIT, Layout, ScheduleName, Template, suits
from heterodyne.search.fleet.predict import Predictor
from heterodyne.search.fleet.rows import MANY_DEVICES, Rows
from heterodyne.search.fleet.shapes import Shapes
from heterodyne.search.fleet.shares import time_until
from heterodyne.search.fleet.space import Space
from heterodyne.search.fleet.spread import spread_s
from heterodyne.search.fleet.tables import Tables
from heterodyne.search.fleet.watch import Watch
from heterodyne.search.fleet.weighed import Mix, Weighed, mix_of

__all__ = ["Search"]

_ENOUGH = 1.01  # times what no plan can beat, at which a search ends
_CLEARLY = 0.9
_WAYS = ((1.0, 1.0), (1.0, 1.1))  # to compare shapes (see `Columns`)
_WAYS_OF_FEW = ((0.0, 1.0), (1.0, 1.0), (0.0, 1.1), (1.0, 1.25))
_WAYS_OF_MANY = ((0.0, 1.0), (0.0, 1.1))  # the shapes are those with which little shows
_STARTS = 3  # mixes that are improved
_STARTS_OF_FEW = 24  # on few devices
_PLAYED_STAGES = 500  # at most, for one list of mixes
_PLAYED = 60  # mixes of whole counts that are played, those with the best bounds first
_OTHERS = 6  # that are weighed to be told
_RESCHEDULED = 8  # mixes that are tried under the other schedules: the best, and those that could be if nothing waited
_RESCHEDULED_OF_FEW = 60  # of the latter, on few devices
_NEARLY = 1.15  # times the best, up to which a plan may be a start
_NEARLY_OF_FEW = 1.3
_PART_OF_MANY = 20  # of the work, where pipelines are long
_ACTIONS = 25  # of the orders of a schedule that are as much work as a stage under 1F1B
_Start = tuple[Mix, Weighed, ScheduleName, tuple[ScheduleName, ...]]
"""What is improved, as which schedule it is, and the schedules that may be chosen on the way."""


@dataclass(kw_only=True)
class Search:
    """Searches one space for one model, fleet and global batch. Keeps all that it weighed.

    Args:
        watch: where it says that the search is over, the best that is known by then is the result.
    """

    predictor: Predictor
    space: Space
    watch: Watch = field(default_factory=Watch)
    weighed: dict[Mix, Weighed] = field(default_factory=dict)
    bound_s: float = inf
    stopped: bool = False
    _by_schedules: dict[tuple[Mix, tuple[ScheduleName, ...]], Weighed] = field(default_factory=dict)
    _proposed: dict[Mix, None] = field(default_factory=dict)
    _work: int = 0

    @cached_property
    def rows(self) -> Rows:
        return Rows(predictor=self.predictor, space=self.space)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Of micro-batches, those of which something is known."""
        return self.rows.sizes

    @property
    def fleet(self) -> Fleet:
        return self.predictor.fleet

    @property
    def tables(self) -> Tables:
        return self.predictor.tables

    @cached_property
    def _chosen(self) -> Columns:
        few = self.rows.few
        ways = _WAYS_OF_FEW if few else _WAYS_OF_MANY if self.fleet.devices > MANY_DEVICES else _WAYS
        return Columns(predictor=self.predictor, sizes=self.sizes, most=self.space.columns, few=few, ways=ways)

    @cached_property
    def _cutter(self) -> Cutter:
        return Cutter(predictor=self.predictor, recompute=self.space.recompute)

    @cached_property
    def _mixes(self) -> Mixes:
        return Mixes(predictor=self.predictor, space=self.space)

    @property
    def _first(self) -> tuple[ScheduleName, ...]:
        return self.space.first_schedules

    @cached_property
    def _plain(self) -> tuple[ScheduleName, ...]:
        """Those with one stage on each place."""
        return tuple(schedule for schedule in self.space.schedules if schedule not in INTERLEAVED)

    @cached_property
    def _several(self) -> tuple[ScheduleName, ...]:
        """Those with several."""
        return tuple(s for s in self.space.schedules if s in INTERLEAVED and self.space.max_chunks > 1)

    @property
    def _spent(self) -> int:
        return self._work + self.predictor.actions_played // _ACTIONS

    def run(
        self, score: Score, *, prices: Floats | None = None, budget: float = inf, by_time: bool = True
    ) -> Weighed | None:
        """The best by a score among plans within a budget; None if nothing fits.

        ``prices``: of a device of each pool; ``by_time``: the score is the step's seconds, so that bounds on them rule plans out.
        """
        by_pool = None
        if prices is not None:
            by_pool = {pool.name: float(price) for pool, price in zip(self.fleet.pools, prices, strict=True)}
        most = self.space.max_templates
        aim = Aim(score=score, by_time=by_time, prices=prices, by_pool=by_pool, budget=budget, most_templates=most)
        best = self._run(aim)
        if best is not None and not self.stopped:
            self._weigh_others()
        return best

    def _weigh_others(self) -> None:
        """Some pipelines of other places, which bounds have passed over: what they take is told beside the best plan."""
        others: dict[object, Mix] = {}
        for mix in self._proposed:
            places = (tuple(sorted((home.pool, home.widths) for home in t.homes)) for t, _ in mix)
            others.setdefault(frozenset(places), mix)
        for mix in islice(others.values(), _OTHERS):
            if mix not in self.weighed and not self._late():
                self.weigh(mix, schedules=self._plain)

    def _run(self, aim: Aim) -> Weighed | None:
        # Over many devices pipelines are longer than what is enumerated, and all alike they leave too many over.
        best = None if self.fleet.devices > MANY_DEVICES else self._alike(aim)
        self._bound(self._limits(1, aim), best)
        if self._enough(best, aim):
            return best
        columns: dict[Template, None] = {}
        best = self._mixed(best, columns, aim)
        if best is None or self._enough(best, aim):
            return best
        if self.space.schedules != self._first and not self._late():
            self._propose(best, columns, aim)
        every = list(columns)
        if self._plain != self._first:
            best, _ = self._rescheduled(best, self._plain, every, aim)
        best = self._improved(best, every, aim)
        if self._several and not self._enough(best, aim):
            best, found = self._rescheduled(best, self._several, every, aim)
            best = self._later_improved(best, found, every, aim)
        return best

    def _enough(self, best: Weighed | None, aim: Aim) -> bool:
        """Whether no plan is faster by more than a search is for."""
        return best is not None and aim.by_time and best.predicted.step_s <= self.bound_s * _ENOUGH

    def _mixed(self, best: Weighed | None, columns: dict[Template, None], aim: Aim) -> Weighed | None:
        """The best of mixes of the shapes that matter, which are added to the columns."""
        about_s = inf
        huge, budgetless = self.fleet.devices > MANY_DEVICES, aim.budget == inf
        # Over many devices the relaxation says well enough what is worth a search; what levels above 1 exchange it does not know.
        many = not self.rows.few
        for zero, shards in self.rows.levels():
            if self._late() or (huge and best is not None and budgetless and columns):
                break
            if many and max(zero) > 1 and best is not None and self._about_s(aim) >= _CLEARLY * about_s:
                break
            limits = self._limits(shards, aim)
            rows = self.rows.of(zero, shards, least=shards)
            if not rows:
                continue
            options = Options.of(self.predictor, rows)
            times = options.times(limits, exchanged=huge)
            if times is None or (many and times.about_s >= (_CLEARLY if max(zero) > 1 else 1) * about_s):
                continue
            about_s = min(about_s, times.about_s)
            if best is not None and aim.by_time and times.bound_s >= best.predicted.step_s:
                continue  # no plan with these shapes is faster
            if many:
                limits = times.limits
            columns.update(dict.fromkeys(self._chosen.of(times.options, limits, times.pipelines_s)))
            own = list(columns)
            best = self._played(self._mixes.alike(own, limits, many=huge), best, aim, self._first)
            known_s = 1e3 * times.about_s if best is None else best.predicted.step_s
            own = self._mixes.worth_most(own, limits, known_s)
            mixes = list(dict.fromkeys(self._mixes.unlike(own, limits, times, known_s, many=huge)))
            best = self._played(mixes, best, aim, self._first)
            if best is not None:
                pairs = self._mixes.pairs(own, limits, best.predicted.step_s)
                best = self._played(pairs, best, aim, self._first)
        return best

    def _alike(self, aim: Aim) -> Weighed | None:
        """The best of pipelines that are all alike, with the least state sharding with which any fits."""
        best: Weighed | None = None
        limits = self._limits(1, aim)
        for zero in dict.fromkeys((self.rows.low, max(self.space.zero))):
            alike = Alike(predictor=self.predictor, space=self.space, zero=zero, limits=limits)
            kinds = {size: fastest(own) for size, own in self.rows.worthwhile().items()}
            found = alike.best(kinds, self.space.columns)
            cut = (mix for size, places in found for mix in self._cutter.cut(places, size, zero, limits))
            best = self._played(list(dict.fromkeys(cut)), best, aim, self._plain)
            if best is not None:
                break
        return best

    def _bound(self, limits: Limits, best: Weighed | None) -> None:
        """What no plan can beat becomes known. ``best``: a plan that is."""
        least = spread_s(self.rows, limits)
        cover = Cover.of(self.rows, limits) if self.fleet.devices <= MANY_DEVICES else None
        if least == inf or (cover is None and self.fleet.devices <= MANY_DEVICES):
            # Whatever fits does so at some level, with state in as many parts as there can be pipelines.
            least = min([least, *(times.bound_s for times in self._anyhow(limits))])
        if cover is not None and best is not None:
            covered = cover.bound_s(best)
            least = covered if least == inf else max(least, covered)
        self.bound_s = min(self.bound_s, least)

    def _about_s(self, aim: Aim) -> float:
        """About what the best comes to by relaxation, at any level."""
        return min((times.about_s for times in self._anyhow(self._limits(1, aim))), default=inf)

    def _anyhow(self, limits: Limits) -> list[Times]:
        return [times for rows in self.rows.anyhow() if (times := self._times(rows, limits))]

    def weigh(
        self, mix: Mix, below_s: float = inf, schedules: tuple[ScheduleName, ...] | None = None
    ) -> Weighed | None:
        """The best way to run these pipelines: every layout and schedule that makes a difference; ``schedules`` None: of the space.

        None if they do not fit, or where their bound is no shorter than ``below_s``.
        """
        deep = any(len(template.stages) > 1 for template, _ in mix)
        templates = [template for template, _ in mix]
        own = tuple(s for s in schedules or self.space.schedules if suits(s, templates)) if deep else self._first[:1]
        if (mix, own) in self._by_schedules:
            return self._by_schedules[mix, own]
        self._work += sum(4 + len(t.stages) + len(t.stages) ** 2 // 16 for t, _ in mix)
        known: list[Weighed] = []
        for schedule in own:
            for layout in self.space.layouts if deep else self.space.layouts[:1]:
                if any(self._no_faster(option, schedule, layout) for option in known):
                    continue
                option = self.predictor.weigh(
                    mix, schedule=schedule, layout=layout, zero=self.space.zero, below_s=below_s
                )
                if option is not None:
                    known.append(option)
                    below_s = option.predicted.step_s
        if not known:
            return None
        best = known[-1]
        self._by_schedules[mix, own] = best
        if mix not in self.weighed or best.predicted.step_s < self.weighed[mix].predicted.step_s:
            self.weighed[mix] = best
            self.watch.saw(best)
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

    def _limits(self, shards: int, aim: Aim) -> Limits:
        room = np.array([pool.devices for pool in self.fleet.pools], dtype=np.int64)
        return Limits(room=room, prices=aim.prices, budget=aim.budget, least=shards, most=self.space.max_pipelines)

    def _times(self, rows: Sequence[Shapes], limits: Limits) -> Times | None:
        return (
            Options.of(self.predictor, rows).times(limits, exchanged=self.fleet.devices > MANY_DEVICES)
            if rows
            else None
        )

    def _played(
        self,
        mixes: Sequence[Mix],
        best: Weighed | None,
        aim: Aim,
        schedules: tuple[ScheduleName, ...],
    ) -> Weighed | None:
        """The best of them, and of what is known already. Where it is not time that counts, bounds only say what comes first.

        Of equals those with larger micro-batches: they have fewer of them to wait for.
        """
        split = not SPLIT.isdisjoint(schedules)
        ranked = sorted(
            (self.predictor.bound_s(mix, split=split), -sum(t.micro_batch * count for t, count in mix), number)
            for number, mix in enumerate(mixes)
            if mix and aim.within(mix)  # where a time is too short for any count, there is no pipeline in it
        )
        self._proposed.update((mixes[number], None) for _, _, number in ranked[:_PLAYED])
        limit = self._spent + _PLAYED_STAGES
        for bound_s, _, number in ranked[:_PLAYED]:
            if (
                self._late()
                or self._spent > limit
                or (aim.by_time and best is not None and bound_s >= best.predicted.step_s)
            ):
                break
            weighed = self.weigh(mixes[number], aim.below_s(best), schedules)
            if aim.better(weighed, best):
                best = weighed
        return best

    def _improved(self, best: Weighed, columns: Sequence[Template], aim: Aim) -> Weighed:
        """From the best mixes, and from the best pipelines that are all alike: a mix may be the better start and the worse end."""
        within = [(mix, w) for mix, w in self.weighed.items() if aim.within(mix)]
        ranked = sorted(within, key=lambda entry: aim.score(entry[1]))
        starts = dict(ranked[: _STARTS_OF_FEW if self.rows.few else _STARTS])
        starts.update([entry for entry in ranked if len(entry[0]) == 1][:1])
        # Over many devices whole numbers hardly matter, and long pipelines take long to play.
        part = _PART_OF_MANY if self.fleet.devices > MANY_DEVICES else 1
        climbs = [(mix, start, start.plan.schedule, self._plain) for mix, start in starts.items()]
        return self._climbed(best, climbs, columns, aim, self.space.work // part)

    def _rescheduled(
        self, best: Weighed, schedules: tuple[ScheduleName, ...], columns: Sequence[Template], aim: Aim
    ) -> tuple[Weighed, dict[Mix, Weighed]]:
        """The best under schedules that are not tried first, and all that were tried; for those that interleave with every number of
        stages on each place.

        Tried are the best mix that is known, and then others and those that would be best if their slowest places always worked, those
        with the least bound first.
        """
        within = [
            mix
            for mix in dict.fromkeys((*self.weighed, *self._proposed))
            if any(len(t.stages) > 1 for t, _ in mix) and aim.within(mix)
        ]
        small = self.rows.few
        known = sorted((m for m in within if m in self.weighed), key=lambda mix: aim.score(self.weighed[mix]))
        known = known[:_RESCHEDULED]
        others: list[Mix] = []
        if aim.by_time:
            count = _RESCHEDULED_OF_FEW if small else _RESCHEDULED
            others += islice(ascending(within, self._steady_s, self._least_after_s, best.predicted.step_s), count)
        steps = self._steps(columns, "1F1B", schedules, aim)
        options: Iterable[Mix] = dict.fromkeys((*known, *others))
        if not INTERLEAVED.isdisjoint(schedules):
            options = [option for mix in options for option in steps.interleaved(mix, self._zero_of(mix))]
            known = []
        elif small:
            # A size that is best where pipelines wait need not be where they do not.
            sizes = (o for mix in options for o in steps.resized(mix, self._zero_of(mix)))
            options = list(dict.fromkeys((*options, *(mix for mix in sizes if aim.within(mix)))))
        nearly = _NEARLY_OF_FEW if small else _NEARLY
        if aim.by_time:
            limit_s = best.predicted.step_s * nearly
            options = [mix for mix in options if self.predictor.could_take(mix, limit_s)]
            options = ascending(options, self.predictor.bound_s, self._least_after_s, limit_s)
        # To play orders takes longer the more stages there are; what pipelines wait is then a smaller part.
        work = self.space.work if small else self.space.work // _PART_OF_MANY
        limit = self._spent + work
        found: dict[Mix, Weighed] = {}
        for mix in dict.fromkeys(chain(known[:1], options)):
            if self._late() or self._spent > limit:
                break
            if self._fewest_actions(mix, schedules[-1]) > work * _ACTIONS:
                continue
            weighed = self.weigh(mix, aim.below_s(best, nearly), schedules)
            if weighed is not None:
                found[mix] = weighed
                if aim.score(weighed) < aim.score(best):
                    best = weighed
        return best, found

    def _later_improved(
        self, best: Weighed, found: Mapping[Mix, Weighed], columns: Sequence[Template], aim: Aim
    ) -> Weighed:
        """From the best that interleave."""
        small = self.rows.few
        count = _STARTS_OF_FEW if small else _STARTS
        starts = sorted(found.items(), key=lambda entry: aim.score(entry[1]))[:count]
        climbs = [(mix, start, start.plan.schedule, self._several) for mix, start in starts]
        return self._climbed(best, climbs, columns, aim, self.space.work // (1 if small else _PART_OF_MANY))

    def _propose(self, best: Weighed, columns: dict[Template, None], aim: Aim) -> None:
        """Mixes that could be faster if their pipelines waited less than under the first schedules; also adds to the columns."""
        known = [
            (zero, n) for zero, n in self.rows.levels() if best.plan.zero in (0, *zero) and n <= best.plan.pipelines
        ]
        zero, shards = max(known, key=lambda level: level[1], default=((self.rows.low,), 1))
        limits, rows = self._limits(shards, aim), self.rows.of(zero, shards, least=shards)
        mixes = Mixes(predictor=self.predictor, space=self.space, waits=False)
        seconds = best.predicted.step_s
        if self.rows.few and rows:
            options = Options.of(self.predictor, rows)
            columns.update(dict.fromkeys(self._chosen.of(options, limits, seconds, filled=False)))
            self._proposed.update(dict.fromkeys(mixes.alike(list(columns), limits)))
        if not columns:
            return
        own = mixes.worth_most(list(columns), limits, seconds)
        self._proposed.update(dict.fromkeys((*mixes.alike(own, limits), *mixes.pairs(own, limits, seconds))))

    def _steady_s(self, mix: Mix) -> float:
        """Of the pipelines, if the slowest place of each always worked."""
        batch = self.predictor.global_batch
        lines = [([(0.0, self.predictor.longest_s(t))], n * t.micro_batch) for t, n in mix]
        return time_until(lines, [batch] * len(lines), batch)

    def _fewest_actions(self, mix: Mix, schedule: ScheduleName) -> int:
        """That are played for pipelines with several stages on each place, however the batch is shared out."""
        seconds, layout = self.predictor.bound_s(mix), self.space.layouts[0]
        return sum(
            self.predictor.makespans(t, schedule, layout).fewest_actions(int(seconds / self.predictor.longest_s(t)))
            for t, _ in mix
            if t.chunks > 1
        )

    def _least_after_s(self, mix: Mix) -> float:
        return self.predictor.least_after_s(mix, self.space.layouts, self.space.zero)

    def _zero_of(self, mix: Mix) -> int:
        """The level at which it is known to be best, or might be."""
        return self.weighed[mix].plan.zero if mix in self.weighed else self.rows.low

    def _climbed(
        self,
        best: Weighed,
        starts: Sequence[_Start],
        columns: Sequence[Template],
        aim: Aim,
        work: int,
    ) -> Weighed:
        """From each start, as many steps as its part of the work allows."""
        limit = self._spent
        for mix, start, schedule, schedules in starts:
            limit += work // len(starts)
            split = not SPLIT.isdisjoint(schedules)
            steps = self._steps(columns, schedule, schedules, aim)

            def could_beat(tried: Mix, least: float, split: bool = split) -> bool:
                if not aim.within(tried):
                    return False
                if not aim.by_time:
                    return True
                could = self.predictor.could_take
                if not could(tried, least, split=split):
                    return False
                # Over many devices to work out what is exchanged takes longer than to play pipelines.
                many = self.fleet.devices > MANY_DEVICES
                return many or could(tried, least - self._least_after_s(tried), split=split)

            def proceed(limit: int = limit) -> bool:
                return self._spent < limit and not self._late()

            def weigh(tried: Mix, least: float, schedules: tuple[ScheduleName, ...] = schedules) -> Weighed | None:
                return self.weigh(tried, least if aim.by_time else inf, schedules)

            found, _ = climb(start, mix, steps.from_mix, weigh, aim.score, could_beat, proceed)
            if aim.score(found) < aim.score(best):
                best = found
        return best

    def _steps(
        self,
        columns: Sequence[Template],
        schedule: ScheduleName,
        schedules: tuple[ScheduleName, ...],
        aim: Aim,
    ) -> Steps:
        return Steps(
            predictor=self.predictor,
            columns=columns,
            sizes=self.sizes,
            recompute=self.space.recompute,
            widths=self.rows.widths,
            schedule=schedule,
            max_chunks=1 if INTERLEAVED.isdisjoint(schedules) else self.space.max_chunks,
            max_stages=self.space.max_stages,
            most_pipelines=self.space.max_pipelines,
            usd=aim.usd,
        )

    def _late(self) -> bool:
        late = self.watch.over()
        self.stopped = self.stopped or late
        return late

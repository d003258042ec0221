"""The search for the best plan over a fleet.

1. Pipelines over any number of pools are found by dynamic programming and estimated as alike ones (`template_search`, `candidates`); the
best are cut exactly and played (`cutter`). Over many devices this comes after step 5, with the best for each set of pools, and mixes of all
that is known by then are counted again.
2. A lower bound on any plan (`cover`, `lower_bound`): when a plan is close enough to it, the search ends.
3. For every micro-batch size, and with state sharded over more and more pipelines: the templates that fit (`pipeline_templates`). The
relaxed knapsack over them selects those that matter.
4. Integer replica counts of these, for step times between the lower bound and the best known (`counts`).
5. The best of these mixes are played (`ledger`) and improved by local search (`climbing`, `neighbourhood`).
6. Those that would be fastest without pipeline bubbles are tried with several virtual stages per rank (`chunks`).

Steps 1, 3 and 4 optimise the bottleneck stage; plans are always compared by their played time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from math import inf

import numpy as np

from heterodyne.cluster.fleet import Fleet
from heterodyne.search.fleet.arrays import Floats
from heterodyne.search.fleet.candidates import Candidates
from heterodyne.search.fleet.climbing import Climbing
from heterodyne.search.fleet.columns import Columns
from heterodyne.search.fleet.counts import Limits
from heterodyne.search.fleet.criterion import Criterion, Score
from heterodyne.search.fleet.cutter import Cutter
from heterodyne.search.fleet.evaluated_plan import EvaluatedPlan, Mix
from heterodyne.search.fleet.ledger import Ledger
from heterodyne.search.fleet.lower_bound import lower_bound_s
from heterodyne.search.fleet.mixes import Mixes
from heterodyne.search.fleet.options import Options, Times, anyhow
from heterodyne.search.fleet.pipeline_table import MANY_DEVICES, PipelineTable
from heterodyne.search.fleet.plan import SPLIT, ScheduleName, Template
from heterodyne.search.fleet.predict import Predictor
from heterodyne.search.fleet.space import Space
from heterodyne.search.fleet.tables import Tables
from heterodyne.search.fleet.watch import Watch

__all__ = ["Search"]

_ENOUGH = 1.01  # times what no plan can beat, at which a search ends
_CLEARLY = 0.9
_ALIKE = 80  # pipelines that are cut exactly as alike ones: those that are estimated to be the fastest
_ALWAYS_PLAYED = 8  # cuts of these that are played, however much work that is
_ESTIMATED = 4096  # devices, up to which alike pipelines were in better plans than unlike ones over a pool each
_EACH = 2  # over each set of pools
_WAYS = ((1.0, 1.0), (1.0, 1.1))  # to compare shapes (see `Columns`)
_WAYS_OF_FEW = ((0.0, 1.0), (1.0, 1.0), (0.0, 1.1), (1.0, 1.25))
_WAYS_OF_MANY = ((0.0, 1.0), (0.0, 1.1))  # the shapes are those with which little shows
_PLAYED_STAGES = 500  # at most, for one list of mixes
_PLAYED = 60  # mixes of whole counts that are played, those with the best bounds first
_OTHERS = 6  # that are weighed to be told


@dataclass(kw_only=True)
class Search:
    """Search of one space for one model, fleet and global batch. Keeps everything that it has evaluated.

    Args:
        watch: may end the search; the best plan known by then is the result.
    """

    predictor: Predictor
    space: Space
    watch: Watch = field(default_factory=Watch)
    bound_s: float = inf
    _found: dict[int, Candidates] = field(default_factory=dict, repr=False)

    @cached_property
    def ledger(self) -> Ledger:
        return Ledger(predictor=self.predictor, space=self.space, watch=self.watch)

    @property
    def evaluated(self) -> Mapping[Mix, EvaluatedPlan]:
        """The best plan of each mix."""
        return self.ledger.evaluated

    @property
    def stopped(self) -> bool:
        """Whether the search was ended early."""
        return self.ledger.stopped

    @cached_property
    def rows(self) -> PipelineTable:
        return PipelineTable(predictor=self.predictor, space=self.space)

    @property
    def fleet(self) -> Fleet:
        return self.predictor.fleet

    @property
    def tables(self) -> Tables:
        return self.predictor.tables

    def _candidates(self, zero: int) -> Candidates:
        """See `Candidates.found`; made once."""
        if zero not in self._found:
            self._found[zero] = Candidates.found(self.predictor, self.space, self.rows.worthwhile(), zero)
        return self._found[zero]

    @cached_property
    def _chosen(self) -> Columns:
        few = self.rows.few
        ways = _WAYS_OF_FEW if few else _WAYS_OF_MANY if self.fleet.devices > MANY_DEVICES else _WAYS
        return Columns(predictor=self.predictor, sizes=self.rows.sizes, most=self.space.columns, few=few, ways=ways)

    @cached_property
    def _cutter(self) -> Cutter:
        return Cutter(predictor=self.predictor, recompute=self.space.recompute)

    @cached_property
    def _mixes(self) -> Mixes:
        return Mixes(predictor=self.predictor, space=self.space)

    def evaluate(
        self, mix: Mix, below_s: float = inf, schedules: tuple[ScheduleName, ...] | None = None
    ) -> EvaluatedPlan | None:
        """See `Ledger.evaluate`."""
        return self.ledger.evaluate(mix, below_s, schedules)

    def run(
        self, score: Score, *, prices: Floats | None = None, budget: float = inf, by_time: bool = True
    ) -> EvaluatedPlan | None:
        """The plan with the lowest score within a budget; None if nothing fits.

        ``prices``: of one device of each pool; ``by_time``: the score is the step time, so lower bounds prune plans.
        """
        by_pool = None
        if prices is not None:
            by_pool = {pool.name: float(price) for pool, price in zip(self.fleet.pools, prices, strict=True)}
        most = self.space.max_templates
        aim = Criterion(
            score=score, by_time=by_time, prices=prices, by_pool=by_pool, budget=budget, most_templates=most
        )
        best = self._run(aim)
        if best is not None and not self.stopped:
            self._weigh_others()
        return best

    def _weigh_others(self) -> None:
        """Evaluate a few pipelines on other devices that bounds have pruned, so that they can be reported beside the best plan."""
        others: dict[object, Mix] = {}
        for mix in self.ledger.proposed:
            places = (tuple(sorted((home.pool, home.widths) for home in t.homes)) for t, _ in mix)
            others.setdefault(frozenset(places), mix)
        for mix in islice(others.values(), _OTHERS):
            if mix not in self.evaluated and not self.ledger.late():
                self.ledger.evaluate(mix, schedules=self.space.plain_schedules)

    def _run(self, aim: Criterion) -> EvaluatedPlan | None:
        columns: dict[Template, None] = {}
        best = None if self.fleet.devices > MANY_DEVICES else self._alike(None, {}, aim)
        self.bound_s = min(self.bound_s, lower_bound_s(self.rows, self._limits(1, aim), best))
        if self._enough(best, aim):
            return best
        best = self._mixed(best, columns, aim)
        if MANY_DEVICES < self.fleet.devices <= _ESTIMATED and not self.ledger.late():
            # These are shorter than those for which one pool has memory, so more fit and fewer devices are left over.
            best = self._alike(best, columns, aim)
            best = self._counted(list(columns), self._limits(1, aim), best, aim)
        if best is None or self._enough(best, aim):
            return best
        if self.space.schedules != self.space.first_schedules and not self.ledger.late():
            self._propose(best, columns, aim)
        climbing = Climbing(
            predictor=self.predictor,
            space=self.space,
            rows=self.rows,
            ledger=self.ledger,
            columns=list(columns),
            aim=aim,
        )
        plain, interleaved = self.space.plain_schedules, self.space.interleaved_schedules
        if plain != self.space.first_schedules:
            best = climbing.rescheduled(best, plain)
        best = climbing.improved(best)
        if interleaved and not self._enough(best, aim):
            best = climbing.rescheduled(best, interleaved)
        return best

    def _enough(self, best: EvaluatedPlan | None, aim: Criterion) -> bool:
        """Whether the best plan is within the tolerance of the lower bound."""
        return best is not None and aim.by_time and best.predicted.step_s <= self.bound_s * _ENOUGH

    def _mixed(self, best: EvaluatedPlan | None, columns: dict[Template, None], aim: Criterion) -> EvaluatedPlan | None:
        """The best mix of the selected templates, which are added to the columns."""
        about_s = inf
        huge, budgetless = self.fleet.devices > MANY_DEVICES, aim.budget == inf
        # Over many devices the relaxation says well enough what is worth a search; what levels above 1 exchange it does not know.
        many = not self.rows.few
        for zero, shards in self.rows.levels():
            if self.ledger.late() or (huge and best is not None and budgetless and columns):
                break
            if many and max(zero) > 1 and best is not None:
                anyhow_s = (times.about_s for times in anyhow(self.rows, self._limits(1, aim)))
                if min(anyhow_s, default=inf) >= _CLEARLY * about_s:
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
            best = self._played(self._mixes.alike(own, limits, many=huge), best, aim, self.space.first_schedules)
            best = self._counted(own, limits, best, aim, times)
        return best

    def _counted(
        self,
        columns: Sequence[Template],
        limits: Limits,
        best: EvaluatedPlan | None,
        aim: Criterion,
        times: Times | None = None,
    ) -> EvaluatedPlan | None:
        """The best mix of whole numbers of columns, and what is known. ``times``: of mixes of them."""
        if not columns:
            return best
        bound_s, about_s = (self.bound_s, self.bound_s) if times is None else (times.bound_s, times.about_s)
        known_s = 1e3 * about_s if best is None else best.predicted.step_s
        own = self._mixes.worth_most(columns, limits, known_s)
        huge = self.fleet.devices > MANY_DEVICES
        mixes = self._mixes.unlike(own, limits, times if huge and times else (bound_s, known_s))
        best = self._played(list(dict.fromkeys(mixes)), best, aim, self.space.first_schedules)
        if best is not None:
            pairs = self._mixes.pairs(own, limits, best.predicted.step_s)
            best = self._played(pairs, best, aim, self.space.first_schedules)
        return best

    def _alike(self, best: EvaluatedPlan | None, columns: dict[Template, None], aim: Criterion) -> EvaluatedPlan | None:
        """The best of alike pipelines at the lowest ZeRO level that fits, and of what is known. All are added to the columns."""
        limits, many = self._limits(1, aim), self.fleet.devices > MANY_DEVICES
        for zero in dict.fromkeys((self.rows.low, max(self.space.zero))):
            found = self._candidates(zero).within(limits)
            chosen = found.best_alike(self.predictor.global_batch, _ALIKE, _EACH if many else 0)
            cut = dict.fromkeys(
                mix
                for number in chosen.tolist()
                for mix in self._cutter.cut(found.places[number], int(found.sizes[number]), zero, limits)
            )
            columns.update((template, None) for mix in cut for template, _ in mix)
            mixes = list(cut)
            # A bound says little of what is exchanged, and to play long pipelines is much work.
            best = self._played(mixes[:_ALWAYS_PLAYED], best, aim, self.space.plain_schedules, anyway=_ALWAYS_PLAYED)
            best = self._played(mixes[_ALWAYS_PLAYED:], best, aim, self.space.plain_schedules)
            if best is not None:
                break
        return best

    def _limits(self, shards: int, aim: Criterion) -> Limits:
        room = np.array([pool.devices for pool in self.fleet.pools], dtype=np.int64)
        return Limits(room=room, prices=aim.prices, budget=aim.budget, least=shards, most=self.space.max_pipelines)

    def _played(
        self,
        mixes: Sequence[Mix],
        best: EvaluatedPlan | None,
        aim: Criterion,
        schedules: tuple[ScheduleName, ...],
        anyway: int = 0,
    ) -> EvaluatedPlan | None:
        """The best of the mixes and of what is known. Where the score is not time, bounds only order them. ``anyway``: so many are played
        whatever work that is.

        Ties go to larger micro-batches: there are fewer to wait for.
        """
        split = not SPLIT.isdisjoint(schedules)
        ranked = sorted(
            (self.predictor.bound_s(mix, split=split), -sum(t.micro_batch * count for t, count in mix), number)
            for number, mix in enumerate(mixes)
            if mix and aim.within(mix)  # where a time is too short for any count, there is no pipeline in it
        )
        self.ledger.proposed.update((mixes[number], None) for _, _, number in ranked[:_PLAYED])
        limit = self.ledger.spent + _PLAYED_STAGES
        for place, (bound_s, _, number) in enumerate(ranked[:_PLAYED]):
            beaten = aim.by_time and best is not None and bound_s >= best.predicted.step_s
            if beaten or self.ledger.late() or (place >= anyway and self.ledger.spent > limit):
                break
            weighed = self.ledger.evaluate(mixes[number], aim.below_s(best), schedules)
            if aim.better(weighed, best):
                best = weighed
        return best

    def _propose(self, best: EvaluatedPlan, columns: dict[Template, None], aim: Criterion) -> None:
        """Evaluates mixes that could be faster under schedules with smaller bubbles, and adds to the columns."""
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
            self.ledger.proposed.update(dict.fromkeys(mixes.alike(list(columns), limits)))
        if not columns:
            return
        own = mixes.worth_most(list(columns), limits, seconds)
        self.ledger.proposed.update(dict.fromkeys((*mixes.alike(own, limits), *mixes.pairs(own, limits, seconds))))

"""The search for the best plan over a fleet.

1. Pipelines are found and estimated (`candidates`): over any number of pools by dynamic programming (`template_search`), over few devices
exactly (`exact_search`). The best as alike pipelines are cut exactly and played (`cutter`).
2. A lower bound on any plan (`cover`, `lower_bound`): when a plan is close enough to it, the search ends.
3. The relaxed knapsack over the candidates selects those that matter for unlike pipelines (`columns`).
4. Integer replica counts of these, for step times between the lower bound and the best known (`counts`, `mixes`).
5. The best of these mixes are played (`ledger`) and improved by local search (`climbing`, `neighbourhood`).
6. Those that would be fastest without pipeline bubbles are tried with several virtual stages per rank (`chunks`).

Steps 1, 3 and 4 optimise the bottleneck stage; plans are always compared by their played time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import islice
from math import inf

import numpy as np

from heterodyne.cluster.fleet import Fleet
from heterodyne.search.fleet.arrays import Floats
from heterodyne.search.fleet.candidates import Candidates
from heterodyne.search.fleet.climbing import Climbing
from heterodyne.search.fleet.columns import Relaxation, columns_of, relaxations
from heterodyne.search.fleet.counts import Limits, best_per_devices
from heterodyne.search.fleet.criterion import Criterion, Score
from heterodyne.search.fleet.cutter import Cutter
from heterodyne.search.fleet.evaluated_plan import EvaluatedPlan, Mix, mix_of
from heterodyne.search.fleet.ledger import Ledger
from heterodyne.search.fleet.lower_bound import lower_bound_s
from heterodyne.search.fleet.mixes import Mixes
from heterodyne.search.fleet.plan import SPLIT, ScheduleName, Template
from heterodyne.search.fleet.predict import Predictor
from heterodyne.search.fleet.space import Space
from heterodyne.search.fleet.stage_kinds import StageKinds
from heterodyne.search.fleet.tables import Tables
from heterodyne.search.fleet.watch import Watch

__all__ = ["Search"]

_ENOUGH = 1.01  # times what no plan can beat, at which a search ends
_ALIKE = 40  # pipelines that are cut exactly as alike ones: those that are estimated to be the fastest
_ALWAYS_PLAYED = 8  # mixes of a list that are played, however much work that is
_PLAYED_STAGES = 500  # at most, for one list of mixes
_PLAYED = 60  # mixes of whole counts that are played, those with the best bounds first
_OTHERS = 6  # that are weighed to be told
_BESIDE = 10  # pipelines for the devices that the best plan leaves over, and for those of each pool
_SOONER = 1 - 1e-6  # times a relaxation, below which another one is shorter
_LONG = 1e3  # times a relaxation, within which any plan is done


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
    _found: dict[tuple[int, int | None], Candidates] = field(default_factory=dict, repr=False)

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
    def kinds(self) -> StageKinds:
        return StageKinds(predictor=self.predictor, space=self.space)

    @property
    def fleet(self) -> Fleet:
        return self.predictor.fleet

    @property
    def tables(self) -> Tables:
        return self.predictor.tables

    def _candidates(self, zero: int, shards: int | None) -> Candidates:
        """See `Candidates.found`; made once."""
        if (zero, shards) not in self._found:
            self._found[zero, shards] = Candidates.found(self.predictor, self.space, self.kinds.every, zero, shards)
        return self._found[zero, shards]

    def _levels(self) -> Iterator[Candidates]:
        """Candidates with memory at ZeRO levels and numbers of pipelines that share state, the least traffic first.

        Over few devices only those that help: which of them the fastest plan has is not known before its counts are.
        """
        low, high = self.space.low_zero, self.space.high_zero
        if not self.kinds.few:
            yield from (self._candidates(zero, None) for zero in (low, *high))
            return
        most = self.kinds.most_pipelines
        alone, shared = self._candidates(low, 1), self._candidates(low, most)
        yield alone
        parts = [2**n for n in range(most.bit_length())]
        if not alone.same(shared):
            yield from (self._candidates(low, shards) for shards in parts[1:])
        if high and not shared.same(self._candidates(high[-1], most)):
            yield from (self._candidates(zero, shards) for zero in high for shards in parts)

    @cached_property
    def _cutter(self) -> Cutter:
        return Cutter(
            predictor=self.predictor,
            recompute=self.space.recompute,
            split=not SPLIT.isdisjoint(self.space.schedules),
        )

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
        alike: dict[Template, None] = {}
        columns: dict[Template, None] = {}
        best = self._alike(alike, aim)
        self.bound_s = min(self.bound_s, lower_bound_s(self.kinds, self._limits(aim), best))
        if self._enough(best, aim):
            return best
        best = self._mixed(best, columns, aim)
        if best is None or self._enough(best, aim):
            return best
        columns.update(alike)
        if self.space.schedules != self.space.first_schedules and not self.ledger.late():
            self._propose(best, columns, aim)
        climbing = Climbing(
            predictor=self.predictor,
            cutter=self._cutter,
            space=self.space,
            kinds=self.kinds,
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

    def _alike(self, columns: dict[Template, None], aim: Criterion) -> EvaluatedPlan | None:
        """The best plan of alike pipelines, at the first level at which any fits. All are added to the columns."""
        samples = self.predictor.global_batch
        for level in self._levels():
            candidates = level.within(self._limits(aim))
            cut = candidates.cut(candidates.best_alike(samples, _ALIKE).tolist(), self._cutter, samples)
            columns.update((template, None) for template, _ in cut)
            mixes = [mix_of([(template, count)]) for template, count in cut]
            # A bound says little of what is exchanged, and to play long pipelines is much work.
            best = self._played(mixes[:_ALWAYS_PLAYED], None, aim, self.space.plain_schedules)
            best = self._played(mixes[_ALWAYS_PLAYED:], best, aim, self.space.plain_schedules)
            if best is not None:
                return best
        return None

    def _mixed(self, best: EvaluatedPlan | None, columns: dict[Template, None], aim: Criterion) -> EvaluatedPlan | None:
        """The best mix of the selected templates, which are added to the columns."""
        samples, about_s = self.predictor.global_batch, inf
        for level in self._levels():
            if self.ledger.late():
                break
            limits = self._limits(aim, level.shards or 1)
            free = replace(limits, least=1)
            candidates = level.within(free)
            found = relaxations(candidates, self.fleet, free, samples) if len(candidates) else []
            # Levels above 1 exchange all that those below do, and more.
            if not found or (level.zero > 1 and found[-1].pipelines_s >= about_s * _SOONER):
                continue
            about_s = min(about_s, found[-1].pipelines_s)
            proposed = replace(self._mixes, zero=level.zero, shards=level.shards)
            for relaxation in found:
                chosen = columns_of(relaxation, self.space.columns, pairs=self.kinds.few)
                cut = relaxation.candidates.cut(chosen, self._cutter, samples)
                own = list(dict.fromkeys(template for template, _ in cut))
                columns.update(dict.fromkeys(own))
                best = self._played(proposed.alike(own, relaxation.limits), best, aim, self.space.first_schedules)
                best = self._counted(list(columns), relaxation, proposed, best, aim)
            if best is not None:
                beside = self._beside(candidates, best, free)
                columns.update((template, None) for own in beside for template, _ in own)
                sides = [template for own in beside for template, _ in own]
                pairs = replace(proposed, waits=False).pairs(sides, free, best.predicted.step_s)
                best = self._played(pairs, best, aim, self.space.plain_schedules)
                if not self.kinds.few:
                    break
        return best

    def _beside(self, candidates: Candidates, best: EvaluatedPlan, limits: Limits) -> list[list[tuple[Template, int]]]:
        """Pipelines that do most in the step of a plan on the devices that it leaves over, and on those of each pool."""
        used = np.array([best.plan.devices.get(pool.name, 0) for pool in self.fleet.pools], dtype=np.int64)
        found = []
        for room in (limits.room - used, *np.diag(limits.room)):
            spare = candidates.within(replace(limits, room=room))
            samples = spare.capacity(best.predicted.step_s - spare.sync_s) * spare.count
            kept = best_per_devices(samples, spare.stages[:, None], 2)
            most = kept[np.argsort(-samples[kept], kind="stable")][:_BESIDE].tolist()
            found.append(spare.cut(most, self._cutter, self.predictor.global_batch))
        return found

    def _counted(
        self,
        columns: Sequence[Template],
        relaxation: Relaxation,
        proposed: Mixes,
        best: EvaluatedPlan | None,
        aim: Criterion,
    ) -> EvaluatedPlan | None:
        """The best mix of whole numbers of columns, and what is known."""
        if not columns:
            return best
        limits = replace(relaxation.limits, least=proposed.shards or 1)
        known_s = _LONG * relaxation.step_s if best is None else best.predicted.step_s
        own = proposed.worth_most(columns, limits, known_s)
        pipelines_s = max(relaxation.pipelines_s, known_s - relaxation.sync_s)
        mixes = proposed.unlike(own, limits, (relaxation.bound_s, pipelines_s))
        best = self._played(list(dict.fromkeys(mixes)), best, aim, self.space.first_schedules)
        if best is not None:
            pairs = proposed.pairs(columns if self.kinds.few else own, limits, best.predicted.step_s)
            best = self._played(pairs, best, aim, self.space.first_schedules)
        return best

    def _limits(self, aim: Criterion, least: int = 1) -> Limits:
        room = np.array([pool.devices for pool in self.fleet.pools], dtype=np.int64)
        return Limits(room=room, prices=aim.prices, budget=aim.budget, least=least, most=self.space.max_pipelines)

    def _played(
        self,
        mixes: Sequence[Mix],
        best: EvaluatedPlan | None,
        aim: Criterion,
        schedules: tuple[ScheduleName, ...],
    ) -> EvaluatedPlan | None:
        """The best of the mixes and of what is known. Where the score is not time, bounds only order them.

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
            if beaten or self.ledger.late() or (place >= _ALWAYS_PLAYED and self.ledger.spent > limit):
                break
            weighed = self.ledger.evaluate(mixes[number], aim.below_s(best), schedules)
            if aim.better(weighed, best):
                best = weighed
        return best

    def _propose(self, best: EvaluatedPlan, columns: dict[Template, None], aim: Criterion) -> None:
        """Proposes mixes of the columns that could be faster under schedules with smaller bubbles."""
        limits, seconds = self._limits(aim), best.predicted.step_s
        mixes = replace(self._mixes, zero=self.space.low_zero, waits=False)
        own = mixes.worth_most(list(columns), limits, seconds)
        self.ledger.proposed.update(dict.fromkeys((*mixes.alike(own, limits), *mixes.pairs(own, limits, seconds))))

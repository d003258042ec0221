"""The search for the best plan over a fleet.

1. Pipelines are found and estimated (`pipeline_table`): over any number of pools by dynamic programming (`template_search`), over few
devices exactly (`exact_search`). The best as alike pipelines are cut exactly and played (`cutter`).
2. A lower bound on any plan (`lower_bound`, `covering`): when a plan is close enough to it, the search ends.
3. The relaxed knapsack over the pipelines selects those that matter for unlike pipelines (`columns`).
4. Integer replica counts of these, for step times between the lower bound and the best known (`counts`, `mixes`).
5. The best of these mixes are played into the pool of candidates (`evaluator`, `pool`) and improved by local search (`climbing`,
`neighbourhood`).
6. Those that would be fastest without pipeline bubbles are tried with several virtual stages per rank (`plan.chunked`).

Steps 1, 3 and 4 optimise the bottleneck stage; plans are always compared by their played time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import islice
from math import inf

import numpy as np

from heterodyne.cluster.fleet import Fleet
from heterodyne.search.fleet.climbing import Climbing
from heterodyne.search.fleet.columns import Relaxation, columns_of, relaxations
from heterodyne.search.fleet.counts import Limits, best_per_devices
from heterodyne.search.fleet.cutter import Cutter
from heterodyne.search.fleet.evaluator import Evaluator, Watch
from heterodyne.search.fleet.kinds import StageKinds
from heterodyne.search.fleet.lower_bound import lower_bound_s
from heterodyne.search.fleet.mixes import Mixes
from heterodyne.search.fleet.neighbourhood import Neighbourhood
from heterodyne.search.fleet.objective import Objective
from heterodyne.search.fleet.pipeline_table import PipelineTable
from heterodyne.search.fleet.plan import SPLIT, Candidate, Mix, ScheduleName, Template, mix_of
from heterodyne.search.fleet.pool import CandidatePool
from heterodyne.search.fleet.predict import Predictor
from heterodyne.search.fleet.space import Space
from heterodyne.search.fleet.tables import Tables

__all__ = ["Search"]

_ENOUGH = 1.01  # times what no plan can beat, at which a search ends
_ALIKE = 40  # pipelines that are cut exactly as alike ones: those that are estimated to be the fastest
_ALWAYS_PLAYED = 8  # mixes of a list that are played, however much work that is
_PLAYED_STAGES = 500  # at most, for one list of mixes
_PLAYED = 60  # mixes of whole counts that are played, those with the best bounds first
_OTHERS = 6  # that are candidate to be told
_BESIDE = 10  # pipelines for the devices that the best plan leaves over, and for those of each pool
_MOST_BESIDE = 6  # of them, those that do most, of whatever number of stages
_SOONER = 1 - 1e-6  # times a relaxation, below which another one is shorter
_LONG = 1e3  # times a relaxation, within which any plan is done


@dataclass(kw_only=True)
class Search:
    """Search of one space for one model, fleet and global batch. Keeps everything that it has evaluated.

    Args:
        watch: may end the search; the best plan known by then is the result.
        objective, limits: of the run that goes on.
    """

    predictor: Predictor
    space: Space
    watch: Watch = field(default_factory=Watch)
    objective: Objective = field(init=False, default_factory=Objective)
    limits: Limits = field(init=False)
    _found: dict[tuple[int, int | None], PipelineTable] = field(default_factory=dict, repr=False)

    @cached_property
    def evaluator(self) -> Evaluator:
        return Evaluator(predictor=self.predictor, space=self.space, watch=self.watch)

    @property
    def pool(self) -> CandidatePool:
        """All candidates of this search."""
        return self.evaluator.pool

    @cached_property
    def kinds(self) -> StageKinds:
        return StageKinds(predictor=self.predictor, space=self.space)

    @property
    def fleet(self) -> Fleet:
        return self.predictor.fleet

    @property
    def tables(self) -> Tables:
        return self.predictor.tables

    def _table(self, zero: int, shards: int | None) -> PipelineTable:
        """See `PipelineTable.found`; it is made once."""
        if (zero, shards) not in self._found:
            self._found[zero, shards] = PipelineTable.found(self.predictor, self.space, self.kinds.every, zero, shards)
        return self._found[zero, shards]

    def _levels(self) -> Iterator[PipelineTable]:
        """Pipelines with memory at ZeRO levels and numbers of pipelines that share state, the least traffic first.

        Over few devices only those that help: which of them the fastest plan has is not known before its counts are.
        """
        low, high = self.space.low_zero, self.space.high_zero
        if not self.kinds.few:
            yield from (self._table(zero, None) for zero in (low, *high))
            return
        most = self.kinds.most_pipelines
        alone, shared = self._table(low, 1), self._table(low, most)
        yield alone
        parts = [2**n for n in range(most.bit_length())]
        if not alone.same(shared):
            yield from (self._table(low, shards) for shards in parts[1:])
        if high and not shared.same(self._table(high[-1], most)):
            yield from (self._table(zero, shards) for zero in high for shards in parts)

    @cached_property
    def _cutter(self) -> Cutter:
        return Cutter(predictor=self.predictor, space=self.space)

    @cached_property
    def _mixes(self) -> Mixes:
        return Mixes(predictor=self.predictor, space=self.space)

    def evaluate(
        self, mix: Mix, below_s: float = inf, schedules: tuple[ScheduleName, ...] | None = None
    ) -> Candidate | None:
        """See `Evaluator.evaluate`."""
        return self.evaluator.evaluate(mix, below_s, schedules)

    def run(self, objective: Objective | None = None, *, budget: float = inf) -> Candidate | None:
        """Return the best plan within a budget; None if nothing fits.

        ``budget``: what all devices may spend per hour, in the unit of the objective's rates.
        """
        self.objective = objective or Objective()
        self.limits = Limits(
            room=np.array([pool.devices for pool in self.fleet.pools], dtype=np.int64),
            prices=self.objective.rates(self.fleet),
            budget=budget,
            most=self.space.max_pipelines,
            max_templates=self.space.max_templates,
            pools=tuple(pool.name for pool in self.fleet.pools),
        )
        best = self._run()
        if best is not None and not self.pool.stopped:
            self._evaluate_others()
        return best

    def _evaluate_others(self) -> None:
        """Evaluate a few pipelines on other devices that bounds have pruned, so that they can be reported beside the best plan."""
        others: dict[object, Mix] = {}
        for mix in self.evaluator.proposed:
            places = (tuple(sorted((home.pool, home.widths) for home in t.homes)) for t, _ in mix)
            others.setdefault(frozenset(places), mix)
        for mix in islice(others.values(), _OTHERS):
            if mix not in self.pool.evaluated and not self.evaluator.late():
                self.evaluate(mix, schedules=self.space.plain_schedules)

    def _run(self) -> Candidate | None:
        alike: dict[Template, None] = {}
        columns: dict[Template, None] = {}
        best = self._alike(alike)
        self.pool.bound_s = min(self.pool.bound_s, lower_bound_s(self.kinds, self.limits, best))
        if self._enough(best):
            return best
        best = self._mixed(best, columns)
        if best is None or self._enough(best):
            return best
        columns.update(alike)
        space = self.space
        if space.schedules != space.first_schedules and not self.evaluator.late():
            self._propose(best, columns)
        moves = Neighbourhood(kinds=self.kinds, cutter=self._cutter, columns=list(columns), limits=self.limits)
        climbing = Climbing(evaluator=self.evaluator, moves=moves, objective=self.objective)
        if space.plain_schedules != space.first_schedules:
            best = climbing.rescheduled(best, space.plain_schedules)
        best = climbing.improved(best)
        if space.interleaved_schedules and not self._enough(best):
            best = climbing.rescheduled(best, space.interleaved_schedules)
        return best

    def _enough(self, best: Candidate | None) -> bool:
        """Return whether the best plan is within the tolerance of the lower bound."""
        return best is not None and self.objective.by_time and best.predicted.step_s <= self.pool.bound_s * _ENOUGH

    def _alike(self, columns: dict[Template, None]) -> Candidate | None:
        """The best plan of alike pipelines, at the first level at which any fits. All are added to the columns."""
        samples = self.predictor.global_batch
        for level in self._levels():
            pipelines = level.within(self.limits)
            cut = pipelines.cut(pipelines.best_alike(samples, _ALIKE).tolist(), self._cutter, samples)
            columns.update((template, None) for template, _ in cut)
            mixes = [mix_of([(template, count)]) for template, count in cut]
            # A bound says little of what is exchanged, and to play long pipelines is much work.
            best = self._played(mixes[:_ALWAYS_PLAYED], None, self.space.plain_schedules)
            best = self._played(mixes[_ALWAYS_PLAYED:], best, self.space.plain_schedules)
            if best is not None:
                return best
        return None

    def _mixed(self, best: Candidate | None, columns: dict[Template, None]) -> Candidate | None:
        """The best mix of the selected templates, which are added to the columns."""
        samples, about_s = self.predictor.global_batch, inf
        for level in self._levels():
            if self.evaluator.late():
                break
            free = self.limits
            pipelines = level.within(free)
            few = self.kinds.few
            found = relaxations(pipelines, self.fleet, free, samples, few=few) if len(pipelines) else []
            # Levels above 1 exchange all that those below do, and more.
            if not found or (level.zero > 1 and found[-1].pipelines_s >= about_s * _SOONER):
                continue
            about_s = min(about_s, found[-1].pipelines_s)
            proposed = replace(self._mixes, zero=level.zero, shards=level.shards)
            for relaxation in found:
                chosen = columns_of(relaxation, self.space.columns, pairs=self.kinds.few)
                cut = relaxation.pipelines.cut(chosen, self._cutter, samples)
                own = list(dict.fromkeys(template for template, _ in cut))
                columns.update(dict.fromkeys(own))
                best = self._played(proposed.alike(own, relaxation.limits), best, self.space.first_schedules)
                best = self._counted(list(columns), relaxation, proposed, best)
            if best is not None:
                beside = self._beside(pipelines, best, free)
                columns.update((template, None) for own in beside for template, _ in own)
                sides = [template for own in beside for template, _ in own]
                pairs = replace(proposed, waits=False).pairs(sides, free, best.predicted.step_s)
                best = self._played(pairs, best, self.space.plain_schedules)
                if not self.kinds.few:
                    break
        return best

    def _beside(self, pipelines: PipelineTable, best: Candidate, limits: Limits) -> list[list[tuple[Template, int]]]:
        """Pipelines that do most in the step of a plan on the devices that it leaves over, and on those of each pool."""
        found = []
        for room in (limits.left(best.plan.mix).room, *np.diag(limits.room)):
            spare = pipelines.within(replace(limits, room=room))
            samples = spare.capacity(best.predicted.step_s - spare.sync_s) * spare.count
            order = np.argsort(-samples, kind="stable")
            kept = np.isin(order, best_per_devices(samples, spare.stages[:, None], 2))
            most = dict.fromkeys([*order[kept][:_BESIDE].tolist(), *order[:_MOST_BESIDE].tolist()])
            found.append(spare.cut(list(most), self._cutter, self.predictor.global_batch))
        return found

    def _counted(
        self, columns: Sequence[Template], relaxation: Relaxation, proposed: Mixes, best: Candidate | None
    ) -> Candidate | None:
        """The best mix of whole numbers of columns, and what is known."""
        if not columns:
            return best
        limits = replace(relaxation.limits, least=proposed.shards or 1)
        known_s = _LONG * relaxation.step_s if best is None else best.predicted.step_s
        own = proposed.worth_most(columns, limits, known_s)
        pipelines_s = max(relaxation.pipelines_s, known_s - relaxation.sync_s)
        mixes = proposed.unlike(own, limits, (relaxation.bound_s, pipelines_s))
        best = self._played(list(dict.fromkeys(mixes)), best, self.space.first_schedules)
        if best is not None:
            pairs = proposed.pairs(columns if self.kinds.few else own, limits, best.predicted.step_s)
            best = self._played(pairs, best, self.space.first_schedules)
        return best

    def _played(
        self, mixes: Sequence[Mix], best: Candidate | None, schedules: tuple[ScheduleName, ...]
    ) -> Candidate | None:
        """The best of the mixes and of what is known. Where the score is not time, bounds only order them.

        Ties go to larger micro-batches: there are fewer to wait for.
        """
        split = not SPLIT.isdisjoint(schedules)
        ranked = sorted(
            (self.predictor.bound_s(mix, split=split), -sum(t.micro_batch * count for t, count in mix), number)
            for number, mix in enumerate(mixes)
            if mix and self.limits.allows(mix)  # where a time is too short for any count, there is no pipeline in it
        )[:_PLAYED]
        self.evaluator.proposed.update((mixes[number], None) for _, _, number in ranked)
        limit = self.evaluator.spent + _PLAYED_STAGES
        for place, (bound_s, _, number) in enumerate(ranked):
            beaten = bound_s >= self.objective.below_s(best)
            if beaten or self.evaluator.late() or (place >= _ALWAYS_PLAYED and self.evaluator.spent > limit):
                break
            candidate = self.evaluate(mixes[number], self.objective.below_s(best), schedules)
            if self.objective.better(candidate, best):
                best = candidate
        return best

    def _propose(self, best: Candidate, columns: dict[Template, None]) -> None:
        """Proposes mixes of the columns that could be faster under schedules with smaller bubbles."""
        limits, seconds = self.limits, best.predicted.step_s
        mixes = replace(self._mixes, zero=self.space.low_zero, waits=False)
        own = mixes.worth_most(list(columns), limits, seconds)
        self.evaluator.proposed.update(dict.fromkeys((*mixes.alike(own, limits), *mixes.pairs(own, limits, seconds))))

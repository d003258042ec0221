"""Local search: other schedules for the mixes that are known, and hill climbing from the best of them within the work limit."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from math import inf

from heterodyne.search.fleet.ascending import ascending
from heterodyne.search.fleet.criterion import Criterion
from heterodyne.search.fleet.cutter import Cutter
from heterodyne.search.fleet.evaluated_plan import EvaluatedPlan, Mix
from heterodyne.search.fleet.ledger import ACTIONS, Ledger
from heterodyne.search.fleet.neighbourhood import Neighbourhood, climb
from heterodyne.search.fleet.plan import INTERLEAVED, SPLIT, ScheduleName, Template
from heterodyne.search.fleet.predict import Predictor
from heterodyne.search.fleet.shares import time_until
from heterodyne.search.fleet.space import Space
from heterodyne.search.fleet.stage_kinds import StageKinds

__all__ = ["Climbing"]

_STARTS = 3  # mixes that are improved
_UNLIKE = 3  # more, each over other pools
_STARTS_OF_FEW = 24  # the same on few devices, where whole numbers make many local optima
_RESCHEDULED = 8  # mixes that are tried under the other schedules: the best, and those that could be if nothing waited
_RESCHEDULED_OF_FEW = 60  # of the latter, on few devices
_NEARLY = 1.15  # times the best, up to which a plan may be a start
_NEARLY_OF_FEW = 1.3
_PART_OF_MANY = 4  # of the work, where pipelines are long
_Start = tuple[Mix, EvaluatedPlan, ScheduleName, tuple[ScheduleName, ...]]
"""What is improved, as which schedule it is, and the schedules that may be chosen on the way."""


@dataclass(frozen=True, kw_only=True)
class Climbing:
    """Local search of one space. ``columns``: templates that may be added to a mix."""

    predictor: Predictor
    cutter: Cutter
    space: Space
    kinds: StageKinds
    ledger: Ledger
    columns: Sequence[Template]
    aim: Criterion

    @property
    def _starts(self) -> int:
        return _STARTS_OF_FEW if self.kinds.few else _STARTS

    def improved(self, best: EvaluatedPlan) -> EvaluatedPlan:
        """The best plan reached by climbing from the best mixes over each choice of pools, and from the best of all: the better start may
        lead to the worse end.
        """
        within = [(mix, w) for mix, w in self.ledger.evaluated.items() if self.aim.within(mix)]
        ranked = sorted(within, key=lambda entry: self.aim.score(entry[1]))
        unlike: dict[object, tuple[Mix, EvaluatedPlan]] = {}
        for entry in ranked:
            unlike.setdefault(frozenset(frozenset(template.devices) for template, _ in entry[0]), entry)
        starts = dict([*ranked[: self._starts], *islice(unlike.values(), _UNLIKE)])
        climbs = [(mix, start, start.plan.schedule, self.space.plain_schedules) for mix, start in starts.items()]
        return self._climbed(best, climbs, self.space.work)

    def rescheduled(self, best: EvaluatedPlan, schedules: tuple[ScheduleName, ...]) -> EvaluatedPlan:
        """The best plan under schedules that are not tried first; interleaved ones with every number of virtual stages, and on few devices
        improved by climbing.

        Tried are the best known mix, then the others in ascending order of their lower bound.
        """
        within = [
            mix
            for mix in dict.fromkeys((*self.ledger.evaluated, *self.ledger.proposed))
            if any(len(t.stages) > 1 for t, _ in mix) and self.aim.within(mix)
        ]
        small = self.kinds.few
        known = sorted(
            (m for m in within if m in self.ledger.evaluated),
            key=lambda mix: self.aim.score(self.ledger.evaluated[mix]),
        )
        known = known[:_RESCHEDULED]
        others: list[Mix] = []
        if self.aim.by_time:
            count = _RESCHEDULED_OF_FEW if small else _RESCHEDULED
            others += islice(
                ascending(within, self._steady_s, self._least_sync_and_update_s, best.predicted.step_s), count
            )
        steps = self._steps("1F1B", schedules)
        options: Iterable[Mix] = dict.fromkeys((*known, *others))
        if not INTERLEAVED.isdisjoint(schedules):
            options = [option for mix in options for option in steps.interleaved(mix, self._zero_of(mix))]
            known = []
        nearly = _NEARLY_OF_FEW if small else _NEARLY
        if self.aim.by_time:
            limit_s = best.predicted.step_s * nearly
            options = [mix for mix in options if self.predictor.bound_at_most(mix, limit_s)]
            options = ascending(options, self.predictor.bound_s, self._least_sync_and_update_s, limit_s)
        # To play orders takes longer the more stages there are; what pipelines wait is then a smaller part.
        work = self.space.work if small else self.space.work // _PART_OF_MANY
        limit = self.ledger.spent + work
        found: dict[Mix, EvaluatedPlan] = {}
        for mix in dict.fromkeys(chain(known[:1], options)):
            if self.ledger.late() or self.ledger.spent > limit:
                break
            if self._fewest_actions(mix, schedules[-1]) > work * ACTIONS:
                continue
            weighed = self.ledger.evaluate(mix, self.aim.below_s(best, nearly), schedules)
            if weighed is None:
                continue
            found[mix] = weighed
            if self.aim.better(weighed, best):
                best = weighed
        if small and not INTERLEAVED.isdisjoint(schedules):
            starts = sorted(found.items(), key=lambda entry: self.aim.score(entry[1]))[: self._starts]
            climbs = [(mix, start, start.plan.schedule, schedules) for mix, start in starts]
            best = self._climbed(best, climbs, self.space.work)
        return best

    def _steady_s(self, mix: Mix) -> float:
        """Seconds of the pipelines if the bottleneck rank of each were never idle."""
        batch = self.predictor.global_batch
        lines = [([(0.0, self.predictor.pipeline_time.longest_s(t))], n * t.micro_batch) for t, n in mix]
        return time_until(lines, [batch] * len(lines), batch)

    def _fewest_actions(self, mix: Mix, schedule: ScheduleName) -> int:
        """Lower bound on the actions that have to be played for interleaved pipelines, however the batch is divided."""
        seconds, layout = self.predictor.bound_s(mix), self.space.layouts[0]
        return sum(
            self.predictor.pipeline_time.makespans(t, schedule, layout).fewest_actions(
                int(seconds / self.predictor.pipeline_time.longest_s(t))
            )
            for t, _ in mix
            if t.chunks > 1
        )

    def _least_sync_and_update_s(self, mix: Mix) -> float:
        return self.predictor.least_sync_and_update_s(mix, self.space.layouts, self.space.zero)

    def _zero_of(self, mix: Mix) -> int:
        """The ZeRO level at which the mix is known to be best, or else may be."""
        return self.ledger.evaluated[mix].plan.zero if mix in self.ledger.evaluated else self.space.low_zero

    def _climbed(
        self,
        best: EvaluatedPlan,
        starts: Sequence[_Start],
        work: int,
    ) -> EvaluatedPlan:
        """Hill climbing from each start; each has an equal part of the work limit."""
        limit = self.ledger.spent
        for mix, start, schedule, schedules in starts:
            limit += work // len(starts)
            split = not SPLIT.isdisjoint(schedules)
            steps = self._steps(schedule, schedules)

            def could_beat(tried: Mix, least: float, split: bool = split) -> bool:
                if not self.aim.within(tried):
                    return False
                if not self.aim.by_time:
                    return True
                could = self.predictor.bound_at_most
                if not could(tried, least, split=split):
                    return False
                return could(tried, least - self._least_sync_and_update_s(tried), split=split)

            def proceed(limit: int = limit) -> bool:
                return self.ledger.spent < limit and not self.ledger.late()

            def evaluate(
                tried: Mix, least: float, schedules: tuple[ScheduleName, ...] = schedules
            ) -> EvaluatedPlan | None:
                return self.ledger.evaluate(tried, least if self.aim.by_time else inf, schedules)

            found, _ = climb(start, mix, steps.from_mix, evaluate, self.aim.score, could_beat, proceed)
            if self.aim.score(found) < self.aim.score(best):
                best = found
        return best

    def _steps(self, schedule: ScheduleName, schedules: tuple[ScheduleName, ...]) -> Neighbourhood:
        return Neighbourhood(
            predictor=self.predictor,
            cutter=self.cutter,
            columns=self.columns,
            sizes=self.kinds.sizes,
            recompute=self.space.recompute,
            widths=self.kinds.widths,
            schedule=schedule,
            max_chunks=1 if INTERLEAVED.isdisjoint(schedules) else self.space.max_chunks,
            max_stages=self.space.max_stages,
            max_pools=self.space.max_pools,
            most_pipelines=self.space.max_pipelines,
            usd=self.aim.usd,
        )

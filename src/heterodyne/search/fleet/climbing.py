"""Local search: other schedules for the mixes that are known, and hill climbing from the best of them within the work limit."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from heapq import heapify, heappop, heappush
from itertools import chain, islice
from math import inf
from typing import TypeVar

from heterodyne.search.fleet.counts import Limits
from heterodyne.search.fleet.evaluator import ACTIONS, Evaluator
from heterodyne.search.fleet.neighbourhood import Neighbourhood
from heterodyne.search.fleet.objective import Objective
from heterodyne.search.fleet.plan import INTERLEAVED, SPLIT, Candidate, Mix, ScheduleName
from heterodyne.search.fleet.predict import Predictor
from heterodyne.search.fleet.shares import time_until
from heterodyne.search.fleet.space import Space

__all__ = ["Climbing", "ascending"]

_STARTS = 3  # mixes that are improved
_UNLIKE = 3  # more, each over other pools
_STARTS_OF_FEW = 24  # the same on few devices, where whole numbers make many local optima
_RESCHEDULED = 8  # mixes that are tried under the other schedules: the best, and those that could be if nothing waited
_RESCHEDULED_OF_FEW = 60  # of the latter, on few devices
_NEARLY = 1.15  # times the best, up to which a plan may be a start
_NEARLY_OF_FEW = 1.3
_PART_OF_MANY = 4  # of the work, where pipelines are long


Item = TypeVar("Item")


@dataclass(frozen=True, kw_only=True)
class Climbing:
    """Local search of one space. ``moves``: under 1F1B; those under other schedules follow from them."""

    evaluator: Evaluator
    moves: Neighbourhood
    objective: Objective

    @property
    def _limits(self) -> Limits:
        return self.moves.limits

    @property
    def _few(self) -> bool:
        return self.moves.kinds.few

    @property
    def _predictor(self) -> Predictor:
        return self.evaluator.predictor

    @property
    def _space(self) -> Space:
        return self.evaluator.space

    @property
    def _starts(self) -> int:
        return _STARTS_OF_FEW if self._few else _STARTS

    def _ranked(self) -> list[tuple[Mix, Candidate]]:
        """The evaluated mixes that the limits allow, the best first."""
        within = [entry for entry in self.evaluator.pool.evaluated.items() if self._limits.allows(entry[0])]
        return sorted(within, key=lambda entry: self.objective.score(entry[1]))

    def improved(self, best: Candidate) -> Candidate:
        """Return the best plan reached by climbing from the best mixes over each choice of pools, and from the best of all: the better
        start may lead to the worse end.
        """
        ranked = self._ranked()
        unlike: dict[object, tuple[Mix, Candidate]] = {}
        for entry in ranked:
            unlike.setdefault(frozenset(frozenset(template.devices) for template, _ in entry[0]), entry)
        starts = dict([*ranked[: self._starts], *islice(unlike.values(), _UNLIKE)])
        return self._climbed(best, list(starts.items()), self._space.plain_schedules)

    def rescheduled(self, best: Candidate, schedules: tuple[ScheduleName, ...]) -> Candidate:
        """Return the best plan under schedules that are not tried first; interleaved ones with every number of virtual stages, and on few
        devices improved by climbing.

        Tried are the best known mixes, then the others in ascending order of their lower bound.
        """
        evaluator, objective, few = self.evaluator, self.objective, self._few
        by_time, interleaved = objective.by_time, not INTERLEAVED.isdisjoint(schedules)
        known = [mix for mix, _ in self._ranked() if _deep(mix)][:_RESCHEDULED]
        options: Iterable[Mix] = known
        if by_time:
            every = dict.fromkeys((*evaluator.pool.evaluated, *evaluator.proposed))
            others = ascending(
                [mix for mix in every if _deep(mix) and self._limits.allows(mix)],
                self._steady_s,
                self._least_sync_and_update_s,
                best.predicted.step_s,
            )
            options = dict.fromkeys((*known, *islice(others, _RESCHEDULED_OF_FEW if few else _RESCHEDULED)))
        if interleaved:
            steps = self._steps("1F1B", schedules)
            options = [option for mix in options for option in steps.interleaved(mix, self._zero_of(mix))]
            known = []
        nearly = _NEARLY_OF_FEW if few else _NEARLY
        if by_time:
            limit_s = best.predicted.step_s * nearly
            options = [mix for mix in options if self._predictor.bound_at_most(mix, limit_s)]
            options = ascending(options, self._predictor.bound_s, self._least_sync_and_update_s, limit_s)
        # To play orders takes longer the more stages there are; what pipelines wait is then a smaller part.
        work = self._space.work if few else self._space.work // _PART_OF_MANY
        limit = evaluator.spent + work
        found: dict[Mix, Candidate] = {}
        for mix in dict.fromkeys(chain(known[:1], options)):
            if evaluator.late() or evaluator.spent > limit:
                break
            if self._fewest_actions(mix, schedules[-1]) > work * ACTIONS:
                continue
            candidate = evaluator.evaluate(mix, objective.below_s(best, nearly), schedules)
            if candidate is None:
                continue
            found[mix] = candidate
            if objective.better(candidate, best):
                best = candidate
        if few and interleaved:
            starts = sorted(found.items(), key=lambda entry: objective.score(entry[1]))[: self._starts]
            best = self._climbed(best, starts, schedules)
        return best

    def _steady_s(self, mix: Mix) -> float:
        """Seconds of the pipelines if the bottleneck rank of each were never idle."""
        batch = self._predictor.global_batch
        lines = [([(0.0, self._predictor.pipeline_time.longest_s(t))], n * t.micro_batch) for t, n in mix]
        return time_until(lines, [batch] * len(lines), batch)

    def _fewest_actions(self, mix: Mix, schedule: ScheduleName) -> int:
        """Lower bound on the actions that have to be played for interleaved pipelines, however the batch is divided."""
        times, layout = self._predictor.pipeline_time, self._space.layouts[0]
        several = [template for template, _ in mix if template.chunks > 1]
        seconds = self._predictor.bound_s(mix) if several else 0.0
        return sum(
            times.makespans(t, schedule, layout).fewest_actions(int(seconds / times.longest_s(t))) for t in several
        )

    def _least_sync_and_update_s(self, mix: Mix) -> float:
        return self._predictor.least_sync_and_update_s(mix, self._space.layouts, self._space.zero)

    def _zero_of(self, mix: Mix) -> int:
        """The ZeRO level at which the mix is known to be best, or else may be."""
        known = self.evaluator.pool.evaluated.get(mix)
        return self._space.low_zero if known is None else known.plan.zero

    def _climbed(
        self, best: Candidate, starts: Sequence[tuple[Mix, Candidate]], schedules: tuple[ScheduleName, ...]
    ) -> Candidate:
        """Hill climbing from each start; each has an equal part of the work limit."""
        limit = self.evaluator.spent
        for start in starts:
            limit += self._space.work // len(starts)
            found = self._top(*start, schedules, limit)
            if self.objective.better(found, best):
                best = found
        return best

    def _top(self, mix: Mix, best: Candidate, schedules: tuple[ScheduleName, ...], limit: int) -> Candidate:
        """First-improvement hill climbing, until no neighbour is better or the work is spent."""
        steps, seen = self._steps(best.plan.schedule, schedules), {mix}
        score, found = self.objective.score, True
        while found:
            found = False
            for tried in steps.from_mix(mix, best.plan.zero):
                if tried in seen or not tried:
                    continue
                seen.add(tried)
                if not self._could_beat(tried, best, schedules):
                    continue
                if self.evaluator.spent >= limit or self.evaluator.late():
                    return best
                candidate = self.evaluator.evaluate(tried, self.objective.below_s(best), schedules)
                if candidate is not None and score(candidate) < score(best) * (1 - 1e-9):
                    best, mix, found = candidate, tried, True
                    break
        return best

    def _could_beat(self, mix: Mix, best: Candidate, schedules: tuple[ScheduleName, ...]) -> bool:
        """Return whether the limits allow a mix, and lower bounds do not show that it is slower than a plan."""
        if not self._limits.allows(mix):
            return False
        least_s, split = self.objective.below_s(best), not SPLIT.isdisjoint(schedules)
        could = self._predictor.bound_at_most
        return least_s == inf or (
            could(mix, least_s, split=split) and could(mix, least_s - self._least_sync_and_update_s(mix), split=split)
        )

    def _steps(self, schedule: ScheduleName, schedules: tuple[ScheduleName, ...]) -> Neighbourhood:
        chunks = 1 if INTERLEAVED.isdisjoint(schedules) else self._space.max_chunks
        return replace(self.moves, schedule=schedule, max_chunks=chunks)


def _deep(mix: Mix) -> bool:
    """Return whether some pipeline has several stages."""
    return any(len(template.stages) > 1 for template, _ in mix)


def ascending(
    items: Iterable[Item], least: Callable[[Item], float], more: Callable[[Item], float], below: float
) -> Iterator[Item]:
    """Items in ascending order of ``least + more``, as far as that is below the limit; ties keep their input order.

    ``least`` is a lower bound and ``more``, which is never negative, is evaluated only for items that may be next (best-first search).
    """
    known = list(items)
    heap = [(value, number, False) for number, item in enumerate(known) if (value := least(item)) < below]
    heapify(heap)
    while heap:
        value, number, whole = heappop(heap)
        if whole:
            yield known[number]
        elif (value := value + more(known[number])) < below:
            heappush(heap, (value, number, True))

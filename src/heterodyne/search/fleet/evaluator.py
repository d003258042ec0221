"""The evaluation of mixes into a pool of candidates: each mix once per set of schedules, and the work that it takes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf
from time import monotonic

from heterodyne.errors import InfeasibleError
from heterodyne.search.fleet.plan import Candidate, Layout, Mix, ScheduleName, suits
from heterodyne.search.fleet.pool import CandidatePool
from heterodyne.search.fleet.predict import Predictor
from heterodyne.search.fleet.space import Space

__all__ = ["ACTIONS", "Evaluator", "StoppedError", "Watch"]

ACTIONS = 25
"""Of the orders of a schedule that are as much work as a stage under 1F1B."""


class StoppedError(InfeasibleError):
    """A search that had to end before it had found a plan: what fits is not known."""

    def __init__(self) -> None:
        super().__init__("the search was stopped before it had found a plan: give it more time")


@dataclass(kw_only=True)
class Watch:
    """Watches one search, or several that belong together.

    Args:
        deadline_s: on the clock of `time.monotonic`.
        asked: whether somebody asks it to end.
        told: called with the fastest plan so far, at most every ``every_s`` seconds.
    """

    deadline_s: float | None = None
    asked: Callable[[], bool] = lambda: False
    told: Callable[[Candidate], None] | None = None
    every_s: float = 5.0
    _fastest: Candidate | None = None
    _last: Candidate | None = None
    _next_s: float = field(init=False)

    def __post_init__(self) -> None:
        self._next_s = monotonic() + self.every_s

    def saw(self, candidate: Candidate) -> None:
        """Notes an evaluated plan."""
        if self._fastest is None or candidate.predicted.step_s < self._fastest.predicted.step_s:
            self._fastest = candidate

    def over(self) -> bool:
        """Return whether the search has to end."""
        if self.told is not None and self._fastest is not self._last and monotonic() >= self._next_s:
            assert self._fastest is not None
            self.told(self._fastest)
            self._last, self._next_s = self._fastest, monotonic() + self.every_s
        return self.asked() or (self.deadline_s is not None and monotonic() >= self.deadline_s)


@dataclass(kw_only=True)
class Evaluator:
    """Evaluates the mixes of one space.

    Args:
        pool: of what is evaluated. ``proposed``: mixes that could be, in their order.
    """

    predictor: Predictor
    space: Space
    watch: Watch
    pool: CandidatePool = field(default_factory=CandidatePool)
    proposed: dict[Mix, None] = field(default_factory=dict)
    _by_schedules: dict[tuple[Mix, tuple[ScheduleName, ...]], Candidate] = field(default_factory=dict)
    _work: int = 0

    @property
    def spent(self) -> int:
        """Work so far, in stages played under 1F1B."""
        return self._work + self.predictor.pipeline_time.played[0] // ACTIONS

    def late(self) -> bool:
        """Return whether the search has to end."""
        late = self.watch.over()
        self.pool.stopped = self.pool.stopped or late
        return late

    def evaluate(
        self, mix: Mix, below_s: float = inf, schedules: tuple[ScheduleName, ...] | None = None
    ) -> Candidate | None:
        """Return the best plan of these pipelines over every layout and schedule that matters; ``schedules`` None: those of the space.

        None if they do not fit, or if their lower bound is no shorter than ``below_s``.
        """
        deep = any(len(template.stages) > 1 for template, _ in mix)
        own = self.space.first_schedules[:1]
        if deep:
            templates = [template for template, _ in mix]
            own = tuple(name for name in schedules or self.space.schedules if suits(name, templates))
        if (mix, own) in self._by_schedules:
            return self._by_schedules[mix, own]
        levels = self.space.zero
        if self.space.runnable and max(levels) > 0 and not self.predictor.stage_tables.cut_alike(mix):
            levels = tuple(level for level in levels if level == 0)
        self._work += sum(4 + len(t.stages) + len(t.stages) ** 2 // 16 for t, _ in mix)
        known: list[Candidate] = []
        for schedule in own:
            for layout in self.space.layouts if deep else self.space.layouts[:1]:
                if any(self._no_faster(option, schedule, layout) for option in known):
                    continue
                option = self.predictor.evaluate(mix, schedule=schedule, layout=layout, zero=levels, below_s=below_s)
                if option is not None:
                    known.append(option)
                    below_s = option.predicted.step_s
        if not known:
            return None
        best = self._by_schedules[mix, own] = known[-1]
        if self.pool.add(mix, best):
            self.watch.saw(best)
        return best

    def _no_faster(self, known: Candidate, schedule: ScheduleName, layout: Layout) -> bool:
        """Return whether the same pipelines and shares take as long under another schedule in the same layout."""
        plan = known.plan
        if plan.schedule == schedule or plan.layout != layout:
            return False
        ours, theirs = (self.predictor.played(plan.mix, name, layout, plan.zero) for name in (schedule, plan.schedule))
        return all(
            ours[group.template].seconds(group.num_microbatches)
            >= theirs[group.template].seconds(group.num_microbatches)
            for group in plan.groups
        )

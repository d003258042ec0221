"""All mixes that a search has evaluated, each once per set of schedules, and the work spent."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf

from heterodyne.search.fleet.evaluated_plan import EvaluatedPlan, Mix, mix_of
from heterodyne.search.fleet.plan import Layout, ScheduleName, suits
from heterodyne.search.fleet.predict import Predictor
from heterodyne.search.fleet.space import Space
from heterodyne.search.fleet.watch import Watch

__all__ = ["ACTIONS", "Ledger"]

ACTIONS = 25
"""Of the orders of a schedule that are as much work as a stage under 1F1B."""


@dataclass(kw_only=True)
class Ledger:
    """The evaluations of one search.

    Args:
        evaluated: the best plan of each mix. ``proposed``: mixes that could be evaluated, in their order.
        stopped: the watch ended the search.
    """

    predictor: Predictor
    space: Space
    watch: Watch
    evaluated: dict[Mix, EvaluatedPlan] = field(default_factory=dict)
    proposed: dict[Mix, None] = field(default_factory=dict)
    stopped: bool = False
    _by_schedules: dict[tuple[Mix, tuple[ScheduleName, ...]], EvaluatedPlan] = field(default_factory=dict)
    _work: int = 0

    @property
    def spent(self) -> int:
        """Work so far, in stages played under 1F1B."""
        return self._work + self.predictor.pipeline_time.played[0] // ACTIONS

    def late(self) -> bool:
        """Whether the search has to end."""
        late = self.watch.over()
        self.stopped = self.stopped or late
        return late

    def evaluate(
        self, mix: Mix, below_s: float = inf, schedules: tuple[ScheduleName, ...] | None = None
    ) -> EvaluatedPlan | None:
        """The best plan of these pipelines over every layout and schedule that matters; ``schedules`` None: those of the space.

        None if they do not fit, or if their lower bound is no shorter than ``below_s``.
        """
        deep = any(len(template.stages) > 1 for template, _ in mix)
        templates = [template for template, _ in mix]
        own = (
            tuple(s for s in schedules or self.space.schedules if suits(s, templates))
            if deep
            else self.space.first_schedules[:1]
        )
        if (mix, own) in self._by_schedules:
            return self._by_schedules[mix, own]
        levels = self.space.zero
        if self.space.runnable and max(levels) > 0 and not self.predictor.stage_tables.cut_alike(mix):
            levels = tuple(level for level in levels if level == 0)
        self._work += sum(4 + len(t.stages) + len(t.stages) ** 2 // 16 for t, _ in mix)
        known: list[EvaluatedPlan] = []
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
        best = known[-1]
        self._by_schedules[mix, own] = best
        if mix not in self.evaluated or best.predicted.step_s < self.evaluated[mix].predicted.step_s:
            self.evaluated[mix] = best
            self.watch.saw(best)
        return best

    def _no_faster(self, known: EvaluatedPlan, schedule: ScheduleName, layout: Layout) -> bool:
        """Whether the same pipelines and shares take as long under another schedule in the same layout."""
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

"""The result of planning, whichever search found it: the plan, the alternatives, and why."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from heterodyne.plan.plan import Plan
from heterodyne.timeline import Timeline

__all__ = ["AlternativeRow", "PlanningResult"]


@dataclass(frozen=True, kw_only=True, slots=True)
class AlternativeRow:
    """One plan that was considered, with its prediction; ``plan`` is None for a way that is infeasible, and ``note`` says why."""

    name: str
    chosen: bool = False
    plan: Plan | None = None
    note: str = ""

    @property
    def step_s(self) -> float | None:
        """Predicted seconds of a step."""
        return None if self.plan is None or self.plan.predicted is None else self.plan.predicted.step_s


@dataclass(frozen=True, kw_only=True)
class PlanningResult:
    """The outcome of a search.

    Args:
        plan: the chosen one, with its prediction and its reason.
        alternatives: everything worth naming that was weighed, the chosen one among them, the best first.
        words: where the step goes and why this plan, sentence by sentence.
        timeline: gives what should happen in a step.
        bound_s: of the step: no plan that was searched is faster; None: not known.
        families: the best of each kind of plan, or why there is none, where that was asked for.
        frontier: the plans that no other one beats in seconds, usd and devices at once, the fastest first.
        stopped: the search was ended before it was done.
        refused: a better plan, which whoever is to run it does not accept.
    """

    plan: Plan
    alternatives: tuple[AlternativeRow, ...]
    words: tuple[str, ...]
    timeline: Callable[[], Timeline]
    bound_s: float | None = None
    families: tuple[AlternativeRow, ...] = ()
    frontier: tuple[Plan, ...] = ()
    stopped: bool = False
    refused: Plan | None = None

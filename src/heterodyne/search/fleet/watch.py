"""A running search as seen from outside: when it has to end, and the best plan so far."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from time import monotonic

from heterodyne.errors import InfeasibleError
from heterodyne.search.fleet.evaluated_plan import EvaluatedPlan

__all__ = ["StoppedError", "Watch"]


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
    told: Callable[[EvaluatedPlan], None] | None = None
    every_s: float = 5.0
    _fastest: EvaluatedPlan | None = None
    _last: EvaluatedPlan | None = None
    _next_s: float = field(init=False)

    def __post_init__(self) -> None:
        self._next_s = monotonic() + self.every_s

    def saw(self, weighed: EvaluatedPlan) -> None:
        """Notes an evaluated plan."""
        if self._fastest is None or weighed.predicted.step_s < self._fastest.predicted.step_s:
            self._fastest = weighed

    def over(self) -> bool:
        """Whether the search has to end."""
        if self.told is not None and self._fastest is not self._last and monotonic() >= self._next_s:
            assert self._fastest is not None
            self.told(self._fastest)
            self._last, self._next_s = self._fastest, monotonic() + self.every_s
        return self.asked() or (self.deadline_s is not None and monotonic() >= self.deadline_s)

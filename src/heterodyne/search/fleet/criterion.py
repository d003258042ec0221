"""The criterion by which a search compares plans: a score, within a budget."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import inf

from heterodyne.search.fleet.arrays import Floats
from heterodyne.search.fleet.evaluated_plan import EvaluatedPlan, Mix

__all__ = ["Criterion", "Score"]

Score = Callable[[EvaluatedPlan], float]
"""Of a plan: the less the better."""


@dataclass(frozen=True, kw_only=True)
class Criterion:
    """The plan with the lowest score among those within a budget.

    Args:
        score: of an evaluated plan; lower is better.
        by_time: the score is the step time in seconds, so lower bounds on step time can prune plans.
        prices: of one device of each pool, in the order of the pools; ``by_pool``: the same by pool name.
        budget: the largest total price, in the unit of ``prices``.
        most_templates: the largest number of different templates in one plan; None: any number.
    """

    score: Score
    by_time: bool = True
    prices: Floats | None = None
    by_pool: Mapping[str, float] | None = None
    budget: float = inf
    most_templates: int | None = None

    def within(self, mix: Mix) -> bool:
        """Whether the mix keeps to the budget and to ``most_templates``."""
        if self.most_templates is not None and len(mix) > self.most_templates:
            return False
        if self.by_pool is None or self.budget == inf:
            return True
        return sum(n * self.by_pool[p] * d for t, n in mix for p, d in t.devices.items()) <= self.budget * (1 + 1e-9)

    def better(self, one: EvaluatedPlan | None, other: EvaluatedPlan | None) -> bool:
        """Whether ``one`` exists and has a lower score than ``other``, or ``other`` does not exist."""
        return one is not None and (other is None or self.score(one) < self.score(other))

    def below_s(self, best: EvaluatedPlan | None, times: float = 1.0) -> float:
        """The step time in seconds above which a plan need not be played; infinite where the score is not time."""
        return best.predicted.step_s * times if self.by_time and best is not None else inf

    @property
    def usd(self) -> tuple[Mapping[str, float], float] | None:
        """The price of one device of each pool, and the budget; None without a budget."""
        return None if self.by_pool is None or self.budget == inf else (self.by_pool, self.budget)

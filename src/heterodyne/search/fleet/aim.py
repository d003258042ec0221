"""What a search goes for, and what it may cost."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import inf

from heterodyne.search.fleet.arrays import Floats
from heterodyne.search.fleet.weighed import Mix, Weighed

__all__ = ["Aim", "Score"]

Score = Callable[[Weighed], float]
"""Of a plan: the less the better."""


@dataclass(frozen=True, kw_only=True)
class Aim:
    """The best by a score among plans within a budget.

    Args:
        prices: of a device of each pool, in their order; ``by_pool``: the same by name.
        by_time: the score is the step's seconds, so that bounds on them rule plans out.
        most_templates: that stand beside each other; None: any number.
    """

    score: Score
    by_time: bool = True
    prices: Floats | None = None
    by_pool: Mapping[str, float] | None = None
    budget: float = inf
    most_templates: int | None = None

    def within(self, mix: Mix) -> bool:
        if self.most_templates is not None and len(mix) > self.most_templates:
            return False
        if self.by_pool is None or self.budget == inf:
            return True
        return sum(n * self.by_pool[p] * d for t, n in mix for p, d in t.devices.items()) <= self.budget * (1 + 1e-9)

    def better(self, one: Weighed | None, other: Weighed | None) -> bool:
        """Whether the one is there, and the other is not or has a worse score."""
        return one is not None and (other is None or self.score(one) < self.score(other))

    def below_s(self, best: Weighed | None, times: float = 1.0) -> float:
        """Steps that are longer need not be played."""
        return best.predicted.step_s * times if self.by_time and best is not None else inf

    @property
    def usd(self) -> tuple[Mapping[str, float], float] | None:
        """What a device of each pool costs, and what all may."""
        return None if self.by_pool is None or self.budget == inf else (self.by_pool, self.budget)

"""The objective of the best plan."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import Literal

import numpy as np

from heterodyne.cluster.fleet import Fleet
from heterodyne.search.fleet.arrays import Floats
from heterodyne.search.fleet.plan import Candidate

__all__ = ["Goal", "Objective"]

Goal = Literal["throughput", "money", "energy", "memory"]
_TIE = 1e-6


@dataclass(frozen=True, kw_only=True, slots=True)
class Objective:
    """What is minimised, within a budget.

    Args:
        goal: seconds, usd or joules of a step, or peak bytes of the fullest device.
        usd_per_hour: the largest price of the plan's devices together; None: no limit.
    """

    goal: Goal = "throughput"
    usd_per_hour: float | None = None

    def score(self, candidate: Candidate) -> float:
        """Lower is better; ties go to the faster plan. Infinite where a price or watts are unknown, or above the budget."""
        own = candidate.predicted
        if self.usd_per_hour is not None and (
            own.usd_per_hour is None or own.usd_per_hour > self.usd_per_hour * (1 + 1e-9)
        ):
            return inf
        value = {"throughput": own.step_s, "money": own.usd, "energy": own.joules, "memory": own.peak_bytes}[self.goal]
        return (
            inf if value is None else value if self.goal == "throughput" else value * (1 + _TIE * min(own.step_s, 1e3))
        )

    @property
    def by_time(self) -> bool:
        """Whether the score is the step time, so that lower bounds on the step time prune plans."""
        return self.goal == "throughput"

    def better(self, one: Candidate | None, other: Candidate | None) -> bool:
        """Return whether ``one`` exists and has a lower score than ``other``, or ``other`` does not exist."""
        return one is not None and (other is None or self.score(one) < self.score(other))

    def below_s(self, best: Candidate | None, times: float = 1.0) -> float:
        """Return the step time from which on a plan need not be played; infinite where the score is not the time."""
        return best.predicted.step_s * times if self.by_time and best is not None else inf

    def rates(self, fleet: Fleet) -> Floats | None:
        """What one device of each pool spends per hour, in the unit of the goal; None where nothing is spent."""
        if self.goal == "energy":
            return np.array([pool.watts_per_device or 0.0 for pool in fleet.pools])
        if self.goal == "money" or self.usd_per_hour is not None:
            return np.array([pool.usd_per_device_hour or 0.0 for pool in fleet.pools])
        return None

    def missing(self, fleet: Fleet) -> tuple[str, ...]:
        """Pools whose price or watts the objective needs and the fleet does not state."""
        if self.goal == "energy":
            return tuple(pool.name for pool in fleet.pools if pool.watts_per_device is None)
        if self.goal == "money" or self.usd_per_hour is not None:
            return tuple(pool.name for pool in fleet.pools if pool.usd_per_device_hour is None)
        return ()

"""Replica counts: in a given step time a replica of each template does a number of samples on a number of devices, which is a knapsack.

Its linear relaxation bounds every mix of templates, and its dual prices (the worth of one device of each pool) select the few templates
that matter. Over those the counts are integers, found by mixed integer programming (HiGHS).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, linprog, milp

from heterodyne.search.fleet.arrays import Floats, Ints
from heterodyne.search.fleet.packing import Packing
from heterodyne.search.fleet.quiet import quiet

__all__ = ["Limits", "Relaxed", "best_per_devices", "relaxed", "shortest_s", "whole"]


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Joint limits on all pipelines.

    Args:
        room: devices of each pool.
        prices: of one device of each pool, in any unit; None: no budget.
        budget: in the same unit.
        least, most: number of pipelines.
    """

    room: Ints
    prices: Floats | None = None
    budget: float = np.inf
    least: int = 1
    most: int | None = None

    def most_of(self, devices: Ints) -> Ints:
        """The largest number of pipelines that each take ``devices`` of each pool. Shape [..., pools] to [...]."""
        found: Ints = np.where(devices > 0, self.room // np.maximum(1, devices), self.room.max()).min(axis=-1)
        if self.prices is not None and np.isfinite(self.budget):
            each = np.maximum(devices @ self.prices, 1e-12)
            found = np.minimum(found, self.budget * (1 + 1e-9) // each).astype(np.int64)
        return found if self.most is None else np.minimum(found, self.most)

    def rows(self, devices: Ints) -> tuple[Floats, Floats]:
        """The matrix and right side of ``left @ counts <= right``."""
        left = [*devices.T.astype(float)]
        right = [*self.room.astype(float)]
        if self.prices is not None and np.isfinite(self.budget):
            left.append(devices @ self.prices)
            right.append(self.budget)
        if self.most is not None:
            left.append(np.ones(len(devices)))
            right.append(float(self.most))
        if self.least > 1:
            left.append(-np.ones(len(devices)))
            right.append(-float(self.least))
        return np.array(left), np.array(right)


@dataclass(frozen=True, kw_only=True)
class Relaxed:
    """Optimum of the relaxed knapsack. ``samples``: of the batch in the given time; ``prices``: samples that one more device of each pool
    would add (dual variables).
    """

    samples: float
    prices: Floats


def relaxed(capacity: Floats, devices: Ints, limits: Limits) -> Relaxed | None:
    """The relaxed knapsack for templates that each do ``capacity`` samples in the given time; None if the limits are infeasible."""
    left, right = limits.rows(devices)
    samples, found = Packing(right, capacity, left).most() if right.min() >= 0 else (0.0, None)
    if found is None:
        solved = linprog(-capacity, A_ub=left, b_ub=right, bounds=(0, None), method="highs")
        if solved.status != 0:
            return None
        samples, found = float(capacity @ np.asarray(solved.x, float)), -np.asarray(solved.ineqlin.marginals)
    prices = found[: devices.shape[1]]
    if limits.prices is not None and np.isfinite(limits.budget):
        prices = prices + found[devices.shape[1]] * limits.prices
    return Relaxed(samples=samples, prices=prices)


def shortest_s(
    longest_s: Floats, total_s: Floats, sizes: Ints, devices: Ints, limits: Limits, samples: int
) -> tuple[float, float] | None:
    """A lower bound on the step of any mix of these templates, and an estimate of the best one, in seconds; None if no mix keeps the
    limits.

    The bound counts the bottleneck stages only; the estimate adds one fill and drain of each pipeline.
    """
    rates = sizes / longest_s
    keep = best_per_devices(rates, devices)
    best = relaxed(rates[keep], devices[keep], limits)
    if best is None or best.samples <= 0:
        return None
    bound_s = at_s = samples / best.samples
    for _ in range(6):
        capacity = capacities(longest_s, total_s, sizes, at_s)
        keep = best_per_devices(capacity, devices)
        done = relaxed(capacity[keep], devices[keep], limits)
        if done is None:
            return None
        if done.samples >= samples * 0.999:
            break
        # Another second does as much as one without filling and draining.
        at_s += max((samples - done.samples) / best.samples, 1e-3 * at_s)
    return bound_s, at_s


def capacities(longest_s: Floats, total_s: Floats, sizes: Ints, seconds: float | Floats) -> Floats:
    """Samples that each pipeline does in ``seconds``, with fractional micro-batches. Shape [templates]."""
    rounds: Floats = np.maximum(0.0, 1 + (seconds - total_s) / longest_s)
    return sizes * rounds


def best_per_devices(capacity: Floats, devices: Ints, most: int = 1) -> Ints:
    """Of all columns on the same devices those with the largest capacity, in their order."""
    order = np.lexsort((np.arange(len(capacity)), -capacity, *devices.T))
    place = np.arange(len(order))
    new = np.ones(len(order), dtype=bool)
    new[1:] = np.any(devices[order][1:] != devices[order][:-1], axis=1)
    begin = np.maximum.accumulate(np.where(new, place, 0))
    kept: Ints = np.sort(order[place - begin < most])
    return kept


def whole(capacity: Sequence[float], devices: Ints, limits: Limits) -> list[int] | None:
    """Integer counts of pipelines with the most samples in the given time; None if none keeps the limits."""
    left, right = limits.rows(devices)
    most = max(max(capacity, default=0.0), 1.0)
    with quiet():
        found = milp(
            -np.asarray(capacity, float) / most + 1e-9,  # of equals the fewest pipelines
            constraints=LinearConstraint(left, ub=right),
            integrality=np.ones(len(devices), dtype=np.int64),
            bounds=Bounds(0, np.inf),
            options={"mip_rel_gap": 1e-3, "node_limit": 500, "presolve": False},
        )
    if found.x is None:
        return None
    return [round(value) for value in found.x]

"""How many pipelines of which shape: in a given time every shape can do so many samples with so many devices, which is a knapsack.

Its relaxation bounds what any mix of shapes can do, and its prices (what a device of each pool is worth) tell the few shapes that
matter from the many. Among those the counts are whole numbers, found by mixed integer programming (HiGHS).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, linprog, milp

from heterodyne.search.fleet.arrays import Floats, Ints
from heterodyne.search.fleet.quiet import quiet

__all__ = ["Limits", "Relaxed", "best_per_devices", "relaxed", "shortest_s", "whole"]


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What all pipelines together may take.

    Args:
        room: devices of each pool.
        prices: of a device of each pool, in any unit; None: there is no budget.
        budget: in the same unit.
        least, most: pipelines.
    """

    room: Ints
    prices: Floats | None = None
    budget: float = np.inf
    least: int = 1
    most: int | None = None

    def most_of(self, devices: Ints) -> int:
        """Pipelines over so many devices of each pool."""
        counts = [int(room // need) for room, need in zip(self.room, devices, strict=True) if need]
        if self.prices is not None and np.isfinite(self.budget):
            each = float(devices @ self.prices)
            counts += [int(self.budget / each * (1 + 1e-9))] if each > 0 else []
        return min([*counts, *([] if self.most is None else [self.most])])

    def rows(self, devices: Ints) -> tuple[Floats, Floats]:
        """The left and right sides of ``left @ counts <= right``."""
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
    """The knapsack with fractions of pipelines. ``prices``: samples that one more device of each pool would do."""

    samples: float
    prices: Floats


def relaxed(capacity: Floats, devices: Ints, limits: Limits) -> Relaxed | None:
    """Samples that fit into a time, where a pipeline of each column does ``capacity``; None if the limits contradict each other."""
    left, right = limits.rows(devices)
    found = linprog(-capacity, A_ub=left, b_ub=right, bounds=(0, None), method="highs")
    if found.status != 0:
        return None
    marginals = -np.asarray(found.ineqlin.marginals)
    prices = marginals[: devices.shape[1]]
    if limits.prices is not None and np.isfinite(limits.budget):
        prices = prices + marginals[devices.shape[1]] * limits.prices
    return Relaxed(samples=float(capacity @ np.asarray(found.x, float)), prices=prices)


def shortest_s(
    longest_s: Floats, total_s: Floats, sizes: Ints, devices: Ints, limits: Limits, samples: int
) -> tuple[float, float] | None:
    """Two times: one that no mix of these shapes can beat, and about how long the best one takes; None if none keeps the limits.

    The first counts nothing but the slowest stages; the second has every pipeline filled and drained once.
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


def capacities(longest_s: Floats, total_s: Floats, sizes: Ints, seconds: float) -> Floats:
    """Samples that a pipeline does in a time, in fractions of micro-batches."""
    rounds: Floats = np.maximum(0.0, 1 + (seconds - total_s) / longest_s)
    return sizes * rounds


def best_per_devices(capacity: Floats, devices: Ints, most: int = 1) -> Ints:
    """Of all columns with the same devices those that do most, in the order of the columns."""
    order = np.lexsort((np.arange(len(capacity)), -capacity, *devices.T))
    place = np.arange(len(order))
    new = np.ones(len(order), dtype=bool)
    new[1:] = np.any(devices[order][1:] != devices[order][:-1], axis=1)
    begin = np.maximum.accumulate(np.where(new, place, 0))
    kept: Ints = np.sort(order[place - begin < most])
    return kept


def whole(capacity: Sequence[float], devices: Ints, limits: Limits) -> list[int] | None:
    """Counts of pipelines that do most in a time; None if none keeps the limits."""
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

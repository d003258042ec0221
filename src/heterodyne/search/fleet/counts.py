"""Replica counts: in a given step time a replica of each template does a number of samples on a number of devices, which is a knapsack.

Its linear relaxation bounds every mix of templates, and its dual prices (the worth of one device of each pool) select the few templates
that matter. Over those the counts are integers, found by mixed integer programming (HiGHS).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, linprog, milp

from heterodyne.search.fleet.arrays import Floats, Ints
from heterodyne.search.fleet.plan import Mix, Template

__all__ = ["Limits", "Packing", "Relaxed", "best_per_devices", "quiet", "relaxed", "shortest_s", "whole"]


@contextmanager
def quiet() -> Iterator[None]:
    """HiGHS prints a line of its own now and then, whatever its options say; JSON on standard output would break."""
    sys.stdout.flush()
    try:
        kept = os.dup(1)
    except OSError:  # there is no standard output
        yield
        return
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 1)
        yield
    finally:
        os.dup2(kept, 1)
        os.close(nowhere)
        os.close(kept)


_ROUNDING = 1e-9
_PIVOTS = 200


class Packing:
    """Of columns, more of which may be added.

    Args:
        room: of each row, not negative.
        worth: of columns. ``need``: of each row's room, of some at least. Shape [rows, columns].
    """

    def __init__(self, room: Floats, worth: Floats | None = None, need: Floats | None = None) -> None:
        self._room = room
        self._worth, self._need = np.zeros(len(room)), np.eye(len(room))
        self._basis = list(range(len(room)))
        if worth is not None and need is not None:
            self.add(worth, need)

    @property
    def columns(self) -> int:
        return len(self._worth) - len(self._room)

    def add(self, worth: Floats, need: Floats) -> None:
        """More columns."""
        self._worth = np.concatenate([self._worth, worth])
        self._need = np.concatenate([self._need, need], axis=1)

    def most(self) -> tuple[float, Floats | None]:
        """The most that columns are worth, and the prices of a unit of each row's room; None where rounding keeps it from an end."""
        worth, need = self._worth, self._need
        slack = _ROUNDING * worth.max()
        for _ in range(_PIVOTS):
            try:
                inverse = np.linalg.inv(need[:, self._basis])
            except np.linalg.LinAlgError:
                break
            prices: Floats = worth[self._basis] @ inverse
            more = worth - prices @ need
            enter = int(more.argmax())
            if more[enter] <= slack:
                return float(prices @ self._room), np.maximum(0.0, prices)
            used, taken = inverse @ self._room, inverse @ need[:, enter]
            times = np.divide(used, taken, out=np.full(len(used), np.inf), where=taken > _ROUNDING)
            self._basis[int(times.argmin())] = enter
        return 0.0, None


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Joint limits on all pipelines.

    Args:
        room: devices of each pool.
        prices: of one device of each pool, in any unit; None: no budget.
        budget: in the same unit.
        least, most: number of pipelines. ``max_templates``: of different ones.
        pools: names, in the order of the devices.
    """

    room: Ints
    prices: Floats | None = None
    budget: float = np.inf
    least: int = 1
    most: int | None = None
    max_templates: int | None = None
    pools: tuple[str, ...] = ()

    def devices(self, templates: Iterable[Template]) -> Ints:
        """Return the devices of each pool that one pipeline takes. Shape [templates, pools]."""
        used = [[template.devices.get(pool, 0) for pool in self.pools] for template in templates]
        return np.array(used, dtype=np.int64).reshape(len(used), len(self.pools))

    def left(self, mix: Mix) -> Limits:
        """Return the limits on what comes beside some pipelines."""
        count = np.array([replicas for _, replicas in mix], dtype=np.int64)
        used = count @ self.devices(template for template, _ in mix)
        return replace(
            self,
            room=self.room - used,
            budget=self.budget - (0.0 if self.prices is None else float(used @ self.prices)),
            most=None if self.most is None else self.most - int(count.sum()),
        )

    def allows(self, mix: Mix) -> bool:
        """Return whether the pipelines keep the budget and the number of different ones; their devices are not counted."""
        if self.max_templates is not None and len(mix) > self.max_templates:
            return False
        return self.budget == np.inf or self.left(mix).budget >= -1e-9 * self.budget

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

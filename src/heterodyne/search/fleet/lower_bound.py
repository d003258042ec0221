"""A lower bound on the step time of any plan of a space."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from math import inf

import numpy as np
from scipy.optimize import linprog

from heterodyne.search.fleet.counts import Limits
from heterodyne.search.fleet.cover import Cover
from heterodyne.search.fleet.evaluated_plan import EvaluatedPlan
from heterodyne.search.fleet.plan import SPLIT
from heterodyne.search.fleet.stage_kinds import StageKinds

__all__ = ["fractional_bound_s", "lower_bound_s"]

_COVERED = 256  # devices, up to which the bound of `Cover` comes near enough to plans to be worth its time
_CLOSE = 5e-3  # of a time, the part to which the bound is known


def lower_bound_s(kinds: StageKinds, limits: Limits, known: EvaluatedPlan | None) -> float:
    """Seconds that no step is shorter than. ``known``: a plan."""
    least = fractional_bound_s(kinds, limits)
    cover = Cover.of(kinds, limits) if kinds.predictor.fleet.devices <= _COVERED else None
    return least if cover is None or known is None else max(least, cover.bound_s(known))


def fractional_bound_s(kinds: StageKinds, limits: Limits) -> float:
    """Seconds of a step in which no device is ever idle and layers are divided in fractions.

    No micro-batch is in two layers at once: under every schedule it goes forward through all and back. So in a step of T seconds those of a
    size take at most T in the mean, without the halves of backwards for which nothing waits. The devices then have work for T'(T) at least,
    by a linear program over how many micro-batches of a size each kind does of each layer. T' falls with T, so no step is shorter than the
    T that is its own T'. With little time for many devices stages have to be wide, which takes more device seconds.
    """
    work = _work_of(kinds, limits)
    low = work(inf)
    high = work(low)
    while high == inf and low < inf:
        found = work(2 * low)
        low, high = (2 * low, found) if found > 2 * low else (low, 2 * low)
    while high - low > _CLOSE * high:
        middle = (low + high) / 2
        low, high = (middle, high) if work(middle) > middle else (low, middle)
    return low


def _work_of(kinds: StageKinds, limits: Limits) -> Callable[[float], float]:
    """Seconds for which the busiest pool has work, if a micro-batch may take so many in the mean; infinite if none does."""
    tables, sizes, fleet = kinds.predictor.tables, kinds.sizes, kinds.predictor.fleet
    layers = list(dict.fromkeys(tables.costs.layers))
    waited = 0.5 if not SPLIT.isdisjoint(kinds.space.schedules) else 1.0
    limited = limits.prices is not None and np.isfinite(limits.budget)
    prices = limits.prices if limits.prices is not None and limited else np.zeros(len(fleet.pools))
    rooms = np.append(limits.room.astype(float), limits.budget if limited else 1.0)
    columns, waits, equal = [], [], []
    for at, size in enumerate(sizes):
        for kind, (number, layer) in product(kinds.of(size), enumerate(layers)):
            cost = kind.table.costs[tables.costs.layers.index(layer)]
            own = np.zeros(len(rooms))
            own[[kind.pool, -1]] = kind.devices, kind.devices * prices[kind.pool]
            columns.append(own * (cost.forward_s + cost.backward_s))
            waits.append((at, cost.forward_s + waited * cost.backward_s))
            equal.append(at * len(layers) + number)
    if not columns:
        return lambda _: inf
    count, several = len(columns), len(sizes)
    used = np.zeros((len(rooms) + several, count + several + 1))
    used[: len(rooms), :count] = np.array(columns).T
    used[: len(rooms), -1] = -rooms
    used[len(rooms) + np.array([at for at, _ in waits]), np.arange(count)] = [wait for _, wait in waits]
    once = np.zeros((several * len(layers) + 1, used.shape[1]))
    once[equal, np.arange(count)] = 1.0
    for at, size in enumerate(sizes):
        once[at * len(layers) : (at + 1) * len(layers), count + at] = [
            -tables.costs.layers.count(own) for own in layers
        ]
        once[-1, count + at] = size
    whole = [0.0] * (len(once) - 1) + [float(kinds.predictor.global_batch)]
    goal = np.append(np.zeros(count + several), 1.0)

    def work(seconds: float) -> float:
        rows = used if seconds < inf else used[: len(rooms)]
        if seconds < inf:
            used[len(rooms) + np.arange(several), count + np.arange(several)] = -seconds
        found = linprog(goal, A_ub=rows, b_ub=np.zeros(len(rows)), A_eq=once, b_eq=whole)
        return float(found.fun) if found.status == 0 and found.fun else inf

    return work

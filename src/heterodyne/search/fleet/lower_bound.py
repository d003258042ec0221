"""A lower bound on the step time of any plan of a space."""

from __future__ import annotations

from math import inf

import numpy as np
from scipy.optimize import linprog

from heterodyne.search.fleet.counts import Limits
from heterodyne.search.fleet.cover import Cover
from heterodyne.search.fleet.evaluated_plan import EvaluatedPlan
from heterodyne.search.fleet.options import anyhow
from heterodyne.search.fleet.pipeline_table import PipelineTable
from heterodyne.search.fleet.plan import INTERLEAVED

__all__ = ["fractional_bound_s", "lower_bound_s"]

_COVERED = 256  # devices, up to which the bound of `Cover` comes near enough to plans to be worth its time
_NO_TIME_S = 1e-12  # of a layer that costs nothing


def lower_bound_s(rows_of: PipelineTable, limits: Limits, known: EvaluatedPlan | None) -> float:
    """Seconds that no step is shorter than. ``known``: a plan."""
    few = rows_of.predictor.fleet.devices <= _COVERED
    least = fractional_bound_s(rows_of, limits)
    cover = Cover.of(rows_of, limits) if few else None
    if least == inf or (cover is None and few):
        # Whatever fits does so at some level, with state in as many parts as there can be pipelines.
        least = min([least, *(times.bound_s for times in anyhow(rows_of, limits))])
    if cover is not None and known is not None:
        covered = cover.bound_s(known)
        least = covered if least == inf else max(least, covered)
    return least


def fractional_bound_s(rows_of: PipelineTable, limits: Limits) -> float:
    """Seconds of a step in which no device is ever idle and layers are divided in fractions; infinite where no schedule interleaves.

    For any values u of the layers that sum to 1 over a model, a device that takes w[l] for layer l does no more than max u / w per
    second, whatever its layers are. The best u is the dual of the linear program that divides the layers.
    """
    if INTERLEAVED.isdisjoint(rows_of.space.schedules) or rows_of.space.max_chunks < 2:
        return inf
    tables = rows_of.predictor.tables
    layers = list(dict.fromkeys(tables.costs.layers))
    at = [tables.costs.layers.index(layer) for layer in layers]
    pools = len(rows_of.predictor.fleet.pools)
    rows = []
    for size in rows_of.sizes:
        for kind in rows_of.kinds(size):
            for number, cost in enumerate(kind.table.costs[layer] for layer in at):
                row = np.zeros(pools + 1 + len(layers))
                row[kind.pool] = -kind.devices
                row[pools] = 0.0 if limits.prices is None else -kind.devices * limits.prices[kind.pool]
                row[pools + 1 + number] = size / max(cost.forward_s + cost.backward_s, _NO_TIME_S)
                rows.append(row)
    if not rows:
        return inf
    limited = limits.prices is not None and np.isfinite(limits.budget)
    worth = [*map(float, limits.room), limits.budget if limited else 0.0, *([0.0] * len(layers))]
    once = [[0.0] * (pools + 1) + [float(tables.costs.layers.count(layer)) for layer in layers]]
    free = [(0, None)] * pools + [(0, None if limited else 0)] + [(0, None)] * len(layers)
    found = linprog(worth, A_ub=np.array(rows), b_ub=np.zeros(len(rows)), A_eq=once, b_eq=[1.0], bounds=free)
    samples_per_s = float(found.fun) if found.status == 0 and found.fun else inf
    return rows_of.predictor.global_batch / samples_per_s

"""What lies between a plan's step and the bound that no plan can beat, as factors whose product is the whole: for fleets of four sizes.

From the plan downwards: without what shows of its exchange and its update; if its pipelines were always full (filling, waiting, whole
micro-batches); if their layers were divided in fractions; without recompute; with the best widths and micro-batch sizes for the same
devices, whatever the memory; with the devices that it leaves out. That is the bound in fractions, and the last factor is what the bound
that is told is above it.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from math import prod

import numpy as np
from fleets import fleet_of, with_profiles
from planner_speed import rows_of
from results import Results

from heterodyne.search.fleet.counts import Limits
from heterodyne.search.fleet.lower_bound import fractional_bound_s
from heterodyne.search.fleet.plan import Candidate, Template
from heterodyne.search.fleet.planner import FleetPlanner
from heterodyne.search.fleet.search import Search
from heterodyne.search.fleet.space import Space


def main() -> int:
    options = with_profiles(__doc__)
    results = Results("planner_gap")
    for row in rows_of(options.profiles):
        fleet = fleet_of(row.fleet)
        search = FleetPlanner(fleet=fleet, costs=row.costs(fleet), global_batch=row.global_batch).search(Space())
        best = search.run()
        assert best is not None
        step_s = best.predicted.step_s
        factors = _factors(search, best)
        assert abs(prod(factors.values()) * search.pool.bound_s / step_s - 1) < 1e-6
        results.row(
            row.name,
            step_s=step_s,
            bound_s=search.pool.bound_s,
            ratio=step_s / search.pool.bound_s,
            **factors,
        )
    return results.write(options.json)


def _factors(search: Search, best: Candidate) -> dict[str, float]:
    """See the beginning of this file."""
    own, batch = best.predicted, best.plan.global_batch
    mix = [(group.template, group.replicas) for group in best.plan.groups]
    longest_s = search.predictor.pipeline_time.longest_s
    full_s = batch / sum(t.micro_batch * count / longest_s(t) for t, count in mix)
    even_s, plain_s = (
        batch / sum(t.micro_batch * count / _even_s(search, t, recompute=again) for t, count in mix)
        for again in (True, False)
    )
    every = Limits(room=np.array([pool.devices for pool in search.fleet.pools], dtype=np.int64))
    used = np.array([sum(t.devices.get(p.name, 0) * n for t, n in mix) for p in search.fleet.pools], dtype=np.int64)
    bounds_s = [fractional_bound_s(search.kinds, limits) for limits in (replace(every, room=used), every)]
    seconds = [own.step_s, own.pipelines_s, full_s, even_s, plain_s, *bounds_s, search.pool.bound_s]
    names = "exchange and update", "filling", "whole layers", "recompute", "widths and sizes", "devices left", "bound"
    return {name: a / b for name, a, b in zip(names, seconds[:-1], seconds[1:], strict=True)}


def _even_s(search: Search, template: Template, *, recompute: bool) -> float:
    """Seconds of a micro-batch on each place of a pipeline if they all take as long, with layers in fractions."""
    tables, layers = search.predictor.tables, len(search.predictor.tables.costs.layers)
    pace = 0.0
    for home in template.homes:
        table = tables.table(search.fleet.pool(home.pool).kind, home.widths, template.micro_batch)
        assert table is not None
        pace += 1 / (table.forward_s(0, layers) + table.backward_s(0, layers, recompute and home.recompute))
    return 1 / pace


if __name__ == "__main__":
    sys.exit(main())

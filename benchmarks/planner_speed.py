"""Seconds that planning takes, for devices that were measured and for fleets, from 32 devices of two kinds to 25,000 of six.

The first fleets are from measured layers, the others from datasheets by the predictor. Nothing is kept between repeats. Memory is the
most that the process ever held. Machines differ, and a shared one from hour to hour: so seconds are told in loops, which is what a plain
loop in Python of four million additions takes beside each plan.
"""

from __future__ import annotations

import resource
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from time import perf_counter

from fleets import LLAMA_3_70B, MOE_1800B, fleet_of, with_profiles
from layer_profiles import read_layer_profiles
from results import ROOT, Results, spread

sys.path.insert(0, str(ROOT / "tests"))

from heterodyne.cluster import Link
from heterodyne.cluster.fleet import Fleet
from heterodyne.cost.layers import LayerCosts
from heterodyne.predictor.layer_costs import predicted_layers
from heterodyne.predictor.roofline import product_s
from heterodyne.search.fleet.planner import FleetPlanner
from heterodyne.search.planner import plan
from pure.build import cluster, graph, linear, profile

REPEATS, QUICK_REPEATS = 5, 2


@dataclass(frozen=True, kw_only=True)
class Row:
    name: str
    fleet: dict[str, int]
    costs: Callable[[Fleet], LayerCosts]
    global_batch: int
    most_loops: float
    over_bound: float


def rows_of(profiles: Path) -> tuple[Row, ...]:
    """``profiles``: a file of measured layers."""
    return (
        Row(
            name="OPT-350M on 32 GPUs of 2 kinds",
            fleet={"A100-40": 16, "V100-16": 16},
            costs=lambda _: read_layer_profiles(profiles, "OPT-350"),
            global_batch=1024,
            most_loops=0.5,
            over_bound=1.05,
        ),
        Row(
            name="Llama-3-8B on 128 GPUs of 3 kinds",
            fleet={"GH-96": 32, "A100-40": 48, "V100-16": 48},
            costs=lambda _: read_layer_profiles(profiles, "LLAMA-3-8"),
            global_batch=1024,
            most_loops=1.0,
            over_bound=1.05,
        ),
        Row(
            name="Llama-3-70B on 1,024 GPUs of 4 kinds",
            fleet={"H100-SXM-80GB": 256, "A100-SXM-80GB": 256, "A100-SXM-40GB": 256, "L40S": 256},
            costs=lambda fleet: predicted_layers(LLAMA_3_70B, fleet),
            global_batch=2048,
            most_loops=4.0,
            over_bound=1.15,
        ),
        Row(
            name="a 1.8T mixture on 25,000 GPUs of 6 kinds",
            fleet={
                "B200": 2000,
                "H200-SXM-141GB": 4000,
                "H100-SXM-80GB": 8000,
                "A100-SXM-80GB": 6000,
                "GH200-96GB": 2000,
                "L40S": 3000,
            },
            costs=lambda fleet: predicted_layers(MOE_1800B, fleet),
            global_batch=8192,
            most_loops=15.0,
            over_bound=1.3,
        ),
    )


def main() -> int:
    options = with_profiles(__doc__)
    results = Results("planner_speed")
    for row in rows_of(options.profiles):
        seconds, loop = [], []
        for _ in range(QUICK_REPEATS if options.quick else REPEATS):
            product_s.cache_clear()
            fleet = fleet_of(row.fleet)
            planner = FleetPlanner(fleet=fleet, costs=row.costs(fleet), global_batch=row.global_batch)
            began = perf_counter()
            planned = planner.plan()
            seconds.append(perf_counter() - began)
            loop.append(_loop_s())
        own = planned.best.predicted
        results.row(
            row.name,
            planning_s=spread(seconds),
            loop_s=spread(loop),
            step_s=own.step_s,
            bound_s=planned.bound_s,
            devices=own.devices,
            pipelines=planned.best.plan.pipelines,
        )
        results.bar(f"median loops, {row.name}", _in_loops(seconds, loop), f"<= {row.most_loops}")
        results.bar(f"step over its bound, {row.name}", own.step_s / planned.bound_s, f"<= {row.over_bound}")
    repeats = QUICK_REPEATS if options.quick else REPEATS
    for devices, blocks, most_loops in ((4, 18, 0.5), (16, 100, 4.0)):
        name = f"{blocks} blocks on {devices} measured devices of 4 speeds"
        results.bar(f"median loops, {name}", _measured(results, name, devices, blocks, repeats), f"<= {most_loops}")
        if not options.quick:
            _measured(results, f"{name}, slow links", devices, blocks, 1, slow=True)
    gib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    results.bar("GiB of memory at most", gib, "<= 1")
    return results.write(options.json)


def _measured(results: Results, name: str, devices: int, blocks: int, repeats: int, *, slow: bool = False) -> float:
    """Median loops for a chain of alike blocks on devices of four speeds. ``slow``: its weights take as long to send as all devices take
    to compute a step, so that it pays to cut it.
    """
    paces = [0.01 * (1 + number % 4) for number in range(devices)]
    model = graph(blocks - 2, width=64, saved=100_000)
    sent_s = 32 / sum(1 / pace for pace in paces)
    link = Link(between=("n0", "n0"), bandwidth_bytes_per_s=model.trainable_bytes / sent_s, latency_s=1e-5)
    machines = cluster(devices, link=link if slow else None)
    known = profile(model, machines, [linear(pace) for pace in paces])
    seconds, loop = [], []
    for _ in range(repeats):
        began = perf_counter()
        planned = plan(model, machines, known, global_batch_size=32)
        seconds.append(perf_counter() - began)
        loop.append(_loop_s())
    assert planned.chosen.simulation is not None
    step_s, loops = planned.chosen.simulation.step_s, _in_loops(seconds, loop)
    results.row(
        name, planning_s=spread(seconds), loop_s=spread(loop), loops=loops, step_s=step_s, plan=planned.chosen.name
    )
    return loops


def _in_loops(seconds: list[float], loop: list[float]) -> float:
    return median(own / beside for own, beside in zip(seconds, loop, strict=True))


def _loop_s() -> float:
    """Of a few million additions and divisions in Python."""
    began, total = perf_counter(), 0
    for number in range(4_000_000):
        total += number * number % 7
    return perf_counter() - began


if __name__ == "__main__":
    sys.exit(main())

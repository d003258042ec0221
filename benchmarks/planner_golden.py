"""The step of the plan that is chosen, beside the best that was ever chosen there: plans over fleets may only become faster.

The fleets of `planner_speed` and `planner_quality`, and fleets drawn from seeds: four to six kinds of GPUs, in whole nodes or one or two of
each, for Llama-3-8B; and devices one by one (`device_cases`), whose plans the simulator plays and which are compared by their step with
its doubt. The steps to reach are in `planner_golden_steps.json`; ``--lower`` writes those that are shorter there. In the whole
form each fleet is planned with ten times the work too: what that finds beyond it is what the search leaves lying.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import process_time

import planner_quality
import planner_speed
from device_cases import device_cases
from fleets import GPUS, LLAMA_3_8B, fleet_of
from layer_profiles import read_layer_profiles
from results import DATA, Results

from heterodyne.cluster.fleet import Fleet
from heterodyne.cost.layers import LayerCosts
from heterodyne.predictor.layer_costs import predicted_layers
from heterodyne.predictor.software import Software
from heterodyne.search.fleet.planner import FleetPlanner
from heterodyne.search.fleet.space import Space

GOLDEN = Path(__file__).with_name("planner_golden_steps.json")
DRAWN, QUICK_DRAWN = 20, 6
KINDS = tuple(name for name in GPUS if not name.endswith(("A100-40", "V100-16", "GH-96")))
SAMPLES = 256
TIMES = 10


@dataclass(frozen=True, kw_only=True)
class Case:
    """What is planned; ``costs`` are made with the fleet. ``quick``: also in the quick form."""

    name: str
    fleet: Fleet
    costs: Callable[[], LayerCosts]
    global_batch: int
    software: Software = field(default_factory=Software)
    quick: bool = False


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a form of at most two minutes")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results here as JSON")
    parser.add_argument("--only", metavar="TEXT", default="", help="the cases with this in their names")
    parser.add_argument("--lower", action="store_true", help="keep the steps that are shorter than the golden ones")
    parser.add_argument("--profiles", type=Path, default=DATA / "layer_profiles.json")
    options = parser.parse_args()
    results = Results("planner_golden")
    golden: dict[str, float] = json.loads(GOLDEN.read_text(encoding="utf-8")) if GOLDEN.exists() else {}
    ratios: list[float] = []
    gains: list[float] = []
    for case in cases(options.profiles):
        if options.only not in case.name or (options.quick and not case.quick):
            continue
        planner = FleetPlanner(
            fleet=case.fleet, costs=case.costs(), global_batch=case.global_batch, software=case.software
        )
        began = process_time()
        best = planner.plan().best
        taken_s, step_s = process_time() - began, best.predicted.step_s
        known_s = golden.get(case.name, step_s)
        ratios.append(step_s / known_s)
        deeper = {}
        if not options.quick:
            space = Space(work=TIMES * Space().work)
            deep_s = planner.plan(space=space).best.predicted.step_s
            deeper["times_as_long_as_with_ten_times_the_work"] = step_s / deep_s
            gains.append(step_s / deep_s)
        kinds = max(len(group.template.devices) for group in best.plan.groups)
        results.row(
            case.name,
            step_s=step_s,
            golden_s=known_s,
            times_as_long=ratios[-1],
            devices=best.predicted.devices,
            kinds_in_a_pipeline=kinds,
            templates=len(best.plan.groups),
            cpu_s=taken_s,
            **deeper,
        )
        if options.lower:
            golden[case.name] = min(step_s, known_s)
            GOLDEN.write_text(json.dumps(golden, indent=1) + "\n", encoding="utf-8")
    for device_case in device_cases():
        if options.only not in device_case.name or (options.quick and not device_case.quick):
            continue
        device_case.prepare()
        began = process_time()
        planned = device_case.plan()
        taken_s, chosen = process_time() - began, planned.chosen
        known_s = golden.get(device_case.name, chosen.weighed_s)
        ratios.append(chosen.weighed_s / known_s)
        results.row(
            device_case.name,
            weighed_s=chosen.weighed_s,
            golden_s=known_s,
            times_as_long=ratios[-1],
            step_s=chosen.step_s,
            chosen=chosen.name,
            cpu_s=taken_s,
        )
        if options.lower:
            golden[device_case.name] = min(chosen.weighed_s, known_s)
            GOLDEN.write_text(json.dumps(golden, indent=1) + "\n", encoding="utf-8")
    results.bar("longest step over its golden one", max(ratios), "<= 1.001")
    if gains:
        results.bar("longest step over what ten times the work finds", max(gains), "<= 1.02")
    return results.write(options.json)


def cases(profiles: Path) -> Iterator[Case]:
    """Every case, in a fixed order. ``profiles``: a file of measured layers."""
    for row in planner_speed.rows_of(profiles):
        fleet = fleet_of(row.fleet)
        yield Case(
            name=row.name,
            fleet=fleet,
            costs=lambda row=row, fleet=fleet: row.costs(fleet),
            global_batch=row.global_batch,
            quick=True,
        )
    for name, key in planner_quality.MODELS.items():
        for counts in dict.fromkeys(
            map(tuple, (own.items() for own in (*planner_quality.FLEETS, *planner_quality.EVERY)))
        ):
            fleet = fleet_of(dict(counts))
            for overlap in (True, False):
                if overlap or dict(counts) in planner_quality.EVERY:
                    yield Case(
                        name=f"{name}, {fleet.name}, {'overlapping' if overlap else 'waiting'}",
                        fleet=fleet,
                        costs=lambda key=key: read_layer_profiles(profiles, key),
                        global_batch=planner_quality.SAMPLES,
                        software=Software(overlap_sends=overlap, overlap_gradients=overlap),
                        quick=fleet.devices <= 16,
                    )
    for seed in range(DRAWN):
        fleet = drawn(seed)
        yield Case(
            name=f"drawn {seed}, {fleet.name}",
            fleet=fleet,
            costs=lambda fleet=fleet: predicted_layers(LLAMA_3_8B, fleet),
            global_batch=SAMPLES,
            quick=seed < QUICK_DRAWN,
        )


def drawn(seed: int) -> Fleet:
    """Four to six kinds: of an even seed one or two nodes each, of an odd one or two single devices."""
    chance = random.Random(seed)
    kinds = chance.sample(KINDS, chance.randint(4, 6))
    if seed % 2 == 0:
        return fleet_of({kind: GPUS[kind].per_node * chance.randint(1, 2) for kind in kinds})
    counts = {kind: chance.randint(1, 2) for kind in kinds}
    fleet = fleet_of({kind: GPUS[kind].per_node for kind in kinds})
    pools = (replace(pool, nodes=counts[pool.kind], devices_per_node=1) for pool in fleet.pools)
    return Fleet(name=" + ".join(f"{n} {kind}" for kind, n in counts.items()), pools=tuple(pools))


if __name__ == "__main__":
    sys.exit(main())

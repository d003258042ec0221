"""The fleet planner against every plan there is: small random models on small random fleets, all plans tried, one played time.

Fleets of one to three kinds with up to six devices, models of up to eight blocks with an embedding and a head, batches of 4 to 64
samples, links from slow to fast and memory from scarce to plenty; in two of five, stages may share sequences and
micro-batches too. The exhaustive search passes over a plan only where pipelines that
never wait would be no faster than the planner's result. Instances come in the order of their numbers; one whose exhaustive search
would be too long is cut to fewer devices before anything is searched.
"""

from __future__ import annotations

import os
import random
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from time import process_time

from results import ROOT, Results, arguments, spread

sys.path.insert(0, str(ROOT / "tests"))

from pure.search.fleet.exhaustive import Exhaustive
from pure.search.fleet.small import drawn, search_of

ALL_CASES, CASES, QUICK_CASES = 300, 150, 60
EQUAL = 1e-9
SIZES = (
    (3, 6, 3),
    (4, 4, 3),
    (4, 8, 1),
    (5, 5, 1),
    (6, 4, 1),
)  # devices, blocks, ways in which two devices share a stage


@dataclass(frozen=True)
class Judged:
    """An instance. ``longer``: the part by which the step is longer than the shortest; None: nothing fits, as was said."""

    number: int
    longer: float | None
    planning_s: float


def main() -> int:
    options = arguments(__doc__, whole=f"{ALL_CASES} instances, not the first {CASES}")
    results = Results("planner_optimality")
    count = QUICK_CASES if options.quick else ALL_CASES if options.all else CASES
    found = []
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        for judged in pool.map(judge, range(count)):
            found.append(judged)
            if judged.longer is not None and judged.longer > EQUAL:
                print(f"instance {judged.number}: {judged.longer:.3%} longer than the best", flush=True)
            if len(found) % 10 == 0:
                print(f"{len(found)} of {count} instances", flush=True)
    longer = [judged.longer for judged in found if judged.longer is not None]
    equal = sum(value <= EQUAL for value in longer) / len(longer)
    results.row("instances", planned=len(longer), nothing_fits=count - len(longer))
    results.row("planning", cpu_s=spread([judged.planning_s for judged in found]))
    results.row("longer than the best plan there is", most=max(longer), equal=equal)
    results.bar("share of instances with the best plan there is", equal, ">= 0.95")
    results.bar("most that a step is longer than the best one", max(longer), "<= 0.01")
    return results.write(options.json)


def judge(number: int) -> Judged:
    """Raises AssertionError where the search or its bound has said what is not so."""
    chance = random.Random(number)
    devices, blocks, ways = SIZES[number % len(SIZES)]
    fleet, costs, samples = drawn(chance, devices=devices, blocks=blocks, ways=ways)
    began = process_time()
    search = search_of(fleet, costs, samples)
    best = search.run()
    planning_s = process_time() - began
    known_s = float("inf") if best is None else best.predicted.step_s
    shortest_s = Exhaustive(search=search_of(fleet, costs, samples), known_s=known_s).shortest_s()
    if best is None:
        assert shortest_s == float("inf"), f"instance {number}: there is a plan, and none was found"
        return Judged(number, None, planning_s)
    assert search.pool.bound_s <= shortest_s * (1 + EQUAL), f"instance {number}: a plan beats its bound"
    return Judged(number, known_s / shortest_s - 1, planning_s)


if __name__ == "__main__":
    sys.exit(main())

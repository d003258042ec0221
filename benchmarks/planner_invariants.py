"""Whether more never makes a plan slower: 20 random fleets of 12 to 256 devices, each changed in ways of which theory says what follows.

A device, a kind, bandwidth, memory or a schedule more must not make the best plan slower by more than 0.5%; names and order of pools must
change nothing; a batch twice as large must take at most twice as long; a larger budget must not buy a slower plan; two runs must be equal.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from math import inf
from pathlib import Path

from fleets import GPUS, LLAMA_3_8B, fleet_of
from results import Results

from heterodyne.cluster.fleet import Fleet, Pool, Wire
from heterodyne.errors import InfeasibleError
from heterodyne.predictor.layer_costs import predicted_layers
from heterodyne.predictor.transformer import Transformer
from heterodyne.search.fleet.objective import Objective
from heterodyne.search.fleet.planner import FleetPlanner
from heterodyne.search.fleet.space import Space

FLEETS, QUICK_FLEETS = 20, 5
MOST = 1.005
"""Times as long as before may take what must not be slower."""
EQUAL = 1 + 1e-9
SMALL = Transformer(layers=24, hidden=1024, heads=16, ffn=4096, vocab=50304, seq=1024)
MODELS = {"0.35B": (SMALL, 512), "8B": (LLAMA_3_8B, 128)}
KINDS = tuple(name for name in GPUS if name not in ("A100-40", "V100-16", "GH-96"))


@dataclass(frozen=True, kw_only=True)
class Task:
    """What is planned. ``usd_per_hour``: the budget, if there is one."""

    fleet: Fleet
    model: str
    samples: int
    space: Space = field(default_factory=Space)
    usd_per_hour: float | None = None

    def step_s(self) -> float:
        """Return the predicted step of the best plan, infinite where nothing fits."""
        transformer, _ = MODELS[self.model]
        costs = predicted_layers(transformer, self.fleet)
        planner = FleetPlanner(fleet=self.fleet, costs=costs, global_batch=self.samples)
        objective = Objective(usd_per_hour=self.usd_per_hour)
        with suppress(InfeasibleError):
            return planner.plan(objective, space=self.space).best.predicted.step_s
        return inf


@dataclass(frozen=True, kw_only=True)
class Check:
    """``after`` may take at most ``most`` times as long as ``before``; if ``equal``, at least as long too."""

    name: str
    before: Task
    after: Task
    most: float = MOST
    equal: bool = False

    def holds(self, ratio: float) -> bool:
        return ratio <= self.most and (not self.equal or ratio >= 1 / self.most)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a form of at most two minutes")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results here as JSON")
    parser.add_argument("--seed", type=int, help="this fleet alone")
    options = parser.parse_args()
    results = Results("planner_invariants")
    seeds = range(QUICK_FLEETS if options.quick else FLEETS) if options.seed is None else [options.seed]
    broken = []
    for seed in seeds:
        task = drawn(seed)
        step_s = task.step_s()
        for check in checks(task, random.Random(seed)):
            before_s = step_s if check.before is task else check.before.step_s()
            after_s = step_s if check.after is task and check.before is not task else check.after.step_s()
            ratio = after_s / before_s if before_s < inf else 0.0
            results.row(
                f"{seed}: {task.model} on {task.fleet.name}, {check.name}",
                before_s=before_s,
                ratio=ratio,
                at_most=check.most,
                holds=check.holds(ratio),
            )
            broken.append(not check.holds(ratio))
    results.bar("broken", sum(broken), "<= 0")
    results.bar("checks", len(broken), f">= {5 * len(seeds)}")
    return results.write(options.json)


def drawn(seed: int) -> Task:
    """Return one or two models on two to five kinds, 12 to 256 devices."""
    chance = random.Random(seed)
    while True:
        kinds = chance.sample(KINDS, chance.randint(2, 5))
        counts = {kind: GPUS[kind].per_node * chance.choice((1, 1, 2, 4, 8)) for kind in kinds}
        if 12 <= sum(counts.values()) <= 256:
            model = chance.choice(list(MODELS))
            return Task(fleet=fleet_of(counts), model=model, samples=MODELS[model][1])


def checks(task: Task, chance: random.Random) -> Iterator[Check]:
    """Yield every check of a task; pools that change are drawn."""
    fleet = task.fleet

    def more(name: str, change: Callable[[Pool], Pool], pool: Pool) -> Check:
        changed = tuple(change(own) if own is pool else own for own in fleet.pools)
        return Check(name=name, before=task, after=replace(task, fleet=replace(fleet, pools=changed)))

    pool = chance.choice(fleet.pools)
    yield more(f"a node of {pool.name} more", lambda own: replace(own, nodes=own.nodes + 1), pool)
    pool = chance.choice(fleet.pools)
    yield more(
        f"{pool.name} with 1.5 times the memory", lambda own: replace(own, memory_bytes=own.memory_bytes * 3 // 2), pool
    )
    pool = chance.choice(fleet.pools)
    yield more(f"{pool.name} with twice the bandwidth", _twice, pool)
    pool = chance.choice(fleet.pools)
    without = replace(fleet, pools=tuple(own for own in fleet.pools if own is not pool))
    yield Check(name=f"{pool.name} added", before=replace(task, fleet=without), after=task)
    few = replace(task, space=Space(schedules=("1F1B", "GPipe")))
    yield Check(name="schedules with halved backwards and interleaved stages added", before=few, after=task)
    order = chance.sample(fleet.pools, len(fleet.pools))
    renamed = tuple(replace(own, name=f"pool {number}") for number, own in enumerate(order))
    yield Check(
        name="other names and another order",
        before=task,
        after=replace(task, fleet=replace(fleet, pools=renamed)),
        most=EQUAL,
        equal=True,
    )
    yield Check(
        name="a batch twice as large", before=task, after=replace(task, samples=2 * task.samples), most=2 * MOST
    )
    whole = sum(own.devices * (own.usd_per_device_hour or 0.0) for own in fleet.pools)
    third, two_thirds = (replace(task, usd_per_hour=part * whole) for part in (1 / 3, 2 / 3))
    yield Check(name="two thirds of the money instead of one", before=third, after=two_thirds)
    yield Check(name="the same again", before=task, after=task, most=1.0, equal=True)


def _twice(pool: Pool) -> Pool:
    def twice(wire: Wire | None) -> Wire | None:
        return wire and replace(wire, bandwidth_bytes_per_s=2 * wire.bandwidth_bytes_per_s)

    return replace(pool, inside=twice(pool.inside), between=twice(pool.between))


if __name__ == "__main__":
    sys.exit(main())

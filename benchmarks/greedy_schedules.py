"""Orders found for unequal stages against the best named schedule that fits into the same memory.

Random pipelines: 2 to 8 places with one stage each or two, F, I, W and R within a factor of four of each other, 4 to 32 micro-batches,
messages that take none to half of a forward, and room on each place for between one micro-batch and all that a deep schedule holds.
Half of them recompute. Both sides are judged by the same clock, and the checker sees to it that what was found can run and fits.
"""

from __future__ import annotations

import random
import sys
from dataclasses import dataclass
from statistics import fmean
from time import process_time

from results import Results, arguments, spread

from heterodyne.plan.schedules.best import best_orders, named_orders
from heterodyne.plan.schedules.check import Fault, order_faults
from heterodyne.plan.schedules.clock import play
from heterodyne.plan.schedules.schedule import Orders, stage_places
from heterodyne.plan.schedules.times import Read, StageBytes, StageTimes, chain

CASES, QUICK_CASES = 200, 30


@dataclass(frozen=True, kw_only=True)
class Case:
    """A pipeline whose order is asked for."""

    times: list[StageTimes]
    places: tuple[int, ...]
    micro_batches: int
    reads: tuple[Read, ...]
    held: list[StageBytes]
    free_bytes: list[int]

    def require_runnable(self, orders: Orders) -> None:
        faults = self.faults(orders)
        assert not faults, faults

    def faults(self, orders: Orders) -> tuple[Fault, ...]:
        return order_faults(
            orders,
            self.places,
            self.micro_batches,
            reads=self.reads,
            held_bytes=self.held,
            free_bytes=self.free_bytes,
        )

    def seconds(self, orders: Orders) -> float:
        return play(orders, self.times, reads=self.reads, held=self.held).makespan_s

    @property
    def recomputing(self) -> frozenset[int]:
        return frozenset(stage for stage, times in enumerate(self.times) if times.recompute_s > 0)


def main() -> int:
    options = arguments(__doc__)
    results = Results("greedy_schedules")
    chance = random.Random(0)
    gains: list[float] = []
    bounds: list[float] = []
    seconds: list[float] = []
    by_origin: dict[str, int] = {}
    alone = 0
    while len(gains) < (QUICK_CASES if options.quick else CASES):
        case = drawn(chance)
        named = best_named(case)
        if named is None:  # no named schedule fits: there is nothing to compare with
            alone += 1
            continue
        began = process_time()
        found = best_orders(
            case.times,
            case.places,
            case.micro_batches,
            reads=case.reads,
            held=case.held,
            free_bytes=case.free_bytes,
        )
        seconds.append(process_time() - began)
        case.require_runnable(found.orders)
        makespan = case.seconds(found.orders)
        gains.append(named / makespan - 1)
        bounds.append(found.bound_s / makespan)
        by_origin[found.came_from] = by_origin.get(found.came_from, 0) + 1
        if len(gains) % 20 == 0:
            print(f"{len(gains)} cases: mean gain {fmean(gains):.3f}", flush=True)
    results.row("gain over the best named schedule that fits", mean=fmean(gains), gain=spread(gains), most=max(gains))
    results.row("share of the lower bound", share=spread(bounds))
    results.row("search", cpu_s=spread(seconds))
    results.row("where no named schedule fits, which are not counted", cases=alone)
    for name, count in sorted(by_origin.items(), key=lambda item: -item[1])[:6]:
        results.row(f"began as {name}", cases=count)
    results.bar("least gain over the best named schedule", min(gains), ">= -1e-9")
    results.bar("mean gain over the best named schedule", fmean(gains), ">= 0")
    return results.write(options.json)


def drawn(chance: random.Random) -> Case:
    places = chance.randint(2, 8)
    on = stage_places(chance.choice(["loop", "v"]), places, chance.choice([1, 1, 2]))
    again = chance.random() < 0.5

    def second() -> float:
        return chance.uniform(1.0, 4.0)

    times = [
        StageTimes(forward_s=second(), input_s=second(), weight_s=second(), recompute_s=second() if again else 0.0)
        for _ in on
    ]
    held = []
    for _ in on:
        size = chance.randint(100, 400)
        held.append(StageBytes(activation=size, input_frees=size // 3, kept=size // 4 if again else None))
    free = []
    for place in range(places):
        mine = [held[stage] for stage, where in enumerate(on) if where == place]
        one = sum(b.activation - b.again for b in mine)
        free.append(int(one * chance.uniform(1.0, 2.0 * places)) + max(b.again for b in mine))
    reads = tuple(chain(len(on), chance.choice([0.0, 0.1, 0.5]) * fmean(t.forward_s for t in times)))
    return Case(
        times=times, places=tuple(on), micro_batches=chance.randint(4, 32), reads=reads, held=held, free_bytes=free
    )


def best_named(case: Case) -> float | None:
    """Seconds of the best of those that fit, played with the same times; None: none fits."""
    orders = named_orders(case.places, case.micro_batches, case.recomputing)
    return min((case.seconds(rows) for rows in orders.values() if not case.faults(rows)), default=None)


if __name__ == "__main__":
    sys.exit(main())

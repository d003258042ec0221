"""Exchanges of a stage in parts: waited for, or hidden behind the other half of the micro-batch.

Emulated workers (CPU quotas) train a Llama whose weights are split over them, one way after the other in the same processes. ``waiting``
exchanges and then goes on; ``halves in turns`` runs each micro-batch as two halves, one of which computes while what the other one
exchanges is on its way (Merak's sub-pipelined tensor parallelism, here for any graph). On slow links that should pay; inside of one
machine, where CPU workers copy what they exchange by hand, there is next to nothing to hide. Either is predicted, at the pace that the
devices have beside the run (`pace`).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import median

from emulation import emulated, ratios, worker_arguments
from hand_made import Rig
from pace import Pace, run_in_turns
from results import Results, arguments, spread
from uneven_tensor_parallel import FULL, QUICK, Size, by_speed, llama, split

from heterodyne.search.planned import IN_TURNS_PAYS

WAITING, IN_TURNS = "waiting", "halves in turns"
SPEEDS = (0.8, 0.4)
LINKS = {"links of 0.5 Gb/s": "0.5Gb/s", "shared memory": None}


def main() -> int:
    options = arguments(__doc__)
    results = Results("overlap")
    size = by_speed(QUICK if options.quick else FULL, SPEEDS)
    gains, expected, errors = {}, {}, []
    for name, links in LINKS.items():
        job = emulated(SPEEDS, [WAITING, IN_TURNS], size, Path(__file__), links=links)
        for way in (WAITING, IN_TURNS):
            predicted = job["predicted"][way]
            errors.append(predicted / median(job[way]) - 1)
            results.row(f"{name}: {way}", step_s=spread(job[way]), predicted_s=predicted, error=errors[-1])
        found = ratios([job], WAITING, IN_TURNS)
        gains[name], expected[name] = median(found), job["predicted"][WAITING] / job["predicted"][IN_TURNS]
        results.row(f"{name}: {WAITING} / {IN_TURNS}", step_ratio=spread(found), predicted_ratio=expected[name])
    slow, near = LINKS
    results.bar(f"gain of halves in turns, {slow}", gains[slow], ">= 1.0")
    # What the planner takes is what it predicts to be clearly faster: it must not be slower than the other way, but for what noise does.
    best = {name: max(gains[name], 1 / gains[name]) for name in LINKS}
    for name in (slow, near):
        chosen = gains[name] if expected[name] * IN_TURNS_PAYS > 1 else 1 / gains[name]
        results.bar(f"the way that the planner takes over the faster way, {name}", chosen / best[name], ">= 0.97")
    results.bar("mean error of the predictions", sum(map(abs, errors)) / len(errors), "<= 0.07")
    return results.write(options.json)


def worker(options: argparse.Namespace, size: Size) -> None:
    import torch

    import heterodyne as hd

    tokens = torch.randint(0, 256, (size.samples, size.length), generator=torch.Generator().manual_seed(1))
    batch = {"input_ids": tokens, "labels": tokens}
    with hd.open_session() as session:
        rig = Rig.of(session, llama(size), batch, (1, size.samples // 2, size.samples), size.budget_s)
        plans = {way: rig.agreed(split(rig, tuple(size.shares), size, overlap=way == IN_TURNS)) for way in options.ways}
        pace = Pace(rig, llama(size), batch)
        workers = {way: rig.worker(plan, llama(size)) for way, plan in plans.items()}
        run: dict[str, Callable[[], object]] = {way: (lambda w=w: w.step(batch)) for way, w in workers.items()}
        run_in_turns(rig, run, plans, pace, options.out, rounds=size.rounds, steps=size.steps)
        for made in workers.values():
            made.close()


if __name__ == "__main__":
    own = worker_arguments()
    sys.exit(main() if own is None else worker(own, Size(**own.size)))

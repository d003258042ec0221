"""Unequal devices, one model: planned shares against equal shares and plain PyTorch DDP, side by side in the same processes.

Four emulated workers (CPU quotas 0.7, 0.35, 0.35, 0.2 of a core) train a GPT of 10.8 M parameters, 64 samples of 128 tokens a
step. In every round each way trains for some steps, one way after the other, so that a machine that gets slower does so for
all. The job is started, measured or confirmed, planned and run twice over, so that one unlucky measurement does not decide.
The ideal is what the devices reach when all compute at the same time, each for itself, without communicating: forward,
backward, clipping and update of its own share. Then the same on four equal devices (0.4 each).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from emulation import EQUAL, UNEQUAL, emulated, in_rounds, ratios, worker_arguments
from results import ROOT, Results, arguments, spread

HERE = Path(__file__)
CLIP = 1.0


@dataclass(frozen=True, kw_only=True)
class Size:
    """How much is trained: ``steps`` of each way in each of the ``rounds`` of each of the ``jobs``.

    Equal devices differ by little, so there ways alternate step by step, for ``equal_rounds``.
    """

    width: int
    layers: int
    batch: int
    length: int
    jobs: int
    rounds: int
    equal_rounds: int
    steps: int
    budget_s: float


FULL = Size(width=384, layers=6, batch=64, length=128, jobs=2, rounds=4, equal_rounds=16, steps=2, budget_s=60)
QUICK = Size(width=192, layers=4, batch=32, length=64, jobs=1, rounds=2, equal_rounds=6, steps=2, budget_s=8)


def main() -> int:
    options = arguments(__doc__)
    results = Results("uneven_data_parallel")
    size = QUICK if options.quick else FULL

    jobs = [emulated(UNEQUAL, ["planned", "equal shares", "DDP", "alone"], size, HERE) for _ in range(size.jobs)]
    report(results, "unequal", jobs)
    ratio = ratios(jobs, "DDP", "planned")
    results.row("unequal: DDP / planned", step_ratio=spread(ratio))
    results.row("unequal: equal shares / planned", step_ratio=spread(ratios(jobs, "equal shares", "planned")))
    efficiency = [
        size.batch / step / ideal
        for job in jobs
        for step, ideal in zip(job["planned"], job["ideal samples/s"], strict=True)
    ]
    results.row("unequal: efficiency", efficiency=spread(efficiency))
    errors = []
    for number, job in enumerate(jobs, 1):
        errors.append(job["predicted step_s"] / median(job["planned"]) - 1)
        results.row(
            f"unequal: job {number}",
            predicted_step_s=job["predicted step_s"],
            error=errors[-1],
            predicted_efficiency=job["predicted efficiency"],
            shares=job["shares"],
        )

    equal = [emulated(EQUAL, ["planned", "DDP"], replace(size, rounds=size.equal_rounds, steps=1), HERE)]
    report(results, "equal", equal)
    even = ratios(equal, "DDP", "planned")
    results.row("equal: DDP / planned", step_ratio=spread(even), shares=equal[0]["shares"])

    results.bar("speed-up over DDP, unequal devices", median(ratio), ">= 1.85")
    results.bar("efficiency, unequal devices", median(efficiency), ">= 0.92")
    results.bar("speed-up over DDP, equal devices", median(even), ">= 1.0")
    results.bar("prediction error of the step time", median(abs(error) for error in errors), "<= 0.10")
    return results.write(options.json)


def report(results: Results, devices: str, jobs: list[dict[str, Any]]) -> None:
    for way in ("planned", "equal shares", "DDP", "alone"):
        if way in jobs[0]:
            results.row(f"{devices}: {way}", step_s=spread([step for job in jobs for step in job[way]]))


def worker(options: argparse.Namespace, size: Size) -> None:
    import torch
    from torch.nn.parallel import DistributedDataParallel

    import heterodyne as hd
    from heterodyne.job import OptimizerSection
    from heterodyne.plan.micro_batches import MicroBatches

    sys.path.insert(0, str(ROOT / "examples"))
    from gpt import build

    def model() -> torch.nn.Module:
        torch.manual_seed(0)
        return build(length=size.length, width=size.width, layers=size.layers, heads=6)

    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, 256, (size.batch, size.length), generator=generator)
    batch = {"input_ids": tokens, "labels": tokens}
    section = OptimizerSection(lr=1e-4)

    with hd.open_session() as session:
        made: dict[str, hd.Distributed] = {}
        profile = None
        for way, plan in (("planned", "data"), ("equal shares", "equal")):
            if way in options.ways:
                made[way] = hd.distribute(
                    model(),
                    batch,
                    optimizer=section,
                    plan=hd.PlanOptions(plan, profile=profile, measure_s=size.budget_s),
                    clip_grad_norm=CLIP,
                    session=session,
                )
                profile = made[way].profile
        planned = made["planned"]
        if session.rank == 0:
            print(planned.explain(), flush=True)
        of_device = {p.stages[0].devices[0]: p.micro_batches for p in planned.plan.pipelines}
        without = MicroBatches((size.batch // session.world_size,))  # what a device without a share computes alone
        of_ranks = [of_device.get(device.id, without) for device in session.cluster.devices]
        micro_batches = of_ranks[session.rank]
        samples = micro_batches.samples

        def optimizer_of(module: torch.nn.Module) -> torch.optim.Optimizer:
            return torch.optim.AdamW(module.parameters(), lr=1e-4, weight_decay=0.1, fused=True)

        module = model()
        ddp = DistributedDataParallel(module)
        ddp_optimizer = optimizer_of(module)
        mine = tokens[
            session.rank * size.batch // session.world_size : (session.rank + 1) * size.batch // session.world_size
        ]

        def ddp_step() -> None:
            ddp_optimizer.zero_grad()
            ddp(input_ids=mine, labels=mine).backward()
            torch.nn.utils.clip_grad_norm_(module.parameters(), CLIP)
            ddp_optimizer.step()

        lonely = model()
        lonely_optimizer = optimizer_of(lonely)

        def alone_step() -> None:
            lonely_optimizer.zero_grad()
            for first, count in micro_batches.offsets():
                part = tokens[first : first + count]
                (lonely(input_ids=part, labels=part) * (count / samples)).backward()
            torch.nn.utils.clip_grad_norm_(lonely.parameters(), CLIP)
            lonely_optimizer.step()

        run: dict[str, Callable[[], object]] = {way: (lambda d=d: d.step(batch)) for way, d in made.items()}
        run |= {"DDP": ddp_step, "alone": alone_step}
        found = in_rounds(
            {way: run[way] for way in options.ways}, session.communicator, rounds=size.rounds, steps=size.steps
        )
        ideal = [
            sum(of.samples / seconds for of, seconds in zip(of_ranks, own, strict=True))
            for own in found.own.get("alone", [])
        ]
        if session.rank == 0:
            predicted = planned.plan.predicted
            assert predicted is not None
            facts = {
                "predicted step_s": predicted.step_s,
                "predicted efficiency": predicted.efficiency,
                "shares": [str(p.micro_batches) for p in planned.plan.pipelines],
            }
            options.out.write_text(json.dumps({**found.seconds, "ideal samples/s": ideal, **facts}))


if __name__ == "__main__":
    given = worker_arguments()
    sys.exit(main() if given is None else worker(given, Size(**given.size)))

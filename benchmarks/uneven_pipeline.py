"""Unequal devices, one pipeline: unequal stages in the best order found against even stages, ours and PyTorch's, side by side.

Four emulated workers (CPU quotas 0.7, 0.35, 0.35, 0.2 of a core) train a GPT of 16 layers, 16 micro-batches a step. Ways: what the
planner makes of it when it is asked for a pipeline; an even cut with 1F1B on our runtime; the same with torch.distributed.pipelining.
In every round each way trains for some steps, one way after the other in the same processes, so that a machine that gets slower
does so for all. The bound is what the devices reach when all compute at the same time, each for itself: forward and backward of the
whole model. Then named schedules on four equal devices (0.4 each).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from emulation import EQUAL, UNEQUAL, emulated, in_rounds, ratios, worker_arguments
from hand_made import Line, Rig, plan_of
from results import ROOT, Results, arguments, spread

from heterodyne.plan.plan import Plan

if TYPE_CHECKING:
    import torch

OURS, EVEN, TORCH, ALONE = "ours", "even 1F1B", "PyTorch 1F1B", "alone"
NAMED = ("ZBH2", "ZBVZeroBubble")
COUNT = 16


@dataclass(frozen=True, kw_only=True)
class Size:
    """How much is trained: ``steps`` of each way in each of the ``rounds``; ``samples`` of a micro-batch."""

    width: int
    layers: int
    samples: int
    length: int
    rounds: int
    steps: int
    budget_s: float


FULL = Size(width=256, layers=16, samples=2, length=128, rounds=8, steps=1, budget_s=60)
QUICK = Size(width=128, layers=16, samples=1, length=64, rounds=2, steps=1, budget_s=6)


def main() -> int:
    options = arguments(__doc__)
    results = Results("uneven_pipeline")
    size = QUICK if options.quick else FULL

    unequal = emulated(UNEQUAL, [OURS, EVEN, TORCH, ALONE], size, Path(__file__))
    report(results, "unequal", unequal)
    batch = COUNT * size.samples
    efficiency = [batch / step / ideal for step, ideal in zip(unequal[OURS], unequal["ideal samples/s"], strict=True)]
    results.row("unequal: share of the bound", efficiency=spread(efficiency), order=unequal["order"])
    speed_up = {way: ratios([unequal], way, OURS) for way in (EVEN, TORCH)}
    for way, ratio in speed_up.items():
        results.row(f"unequal: {way} / ours", step_ratio=spread(ratio))

    equal = emulated(EQUAL, [OURS, EVEN, *NAMED, TORCH], size, Path(__file__))
    report(results, "equal", equal)
    level = ratios([equal], TORCH, OURS)
    results.row(f"equal: {TORCH} / ours", step_ratio=spread(level))
    for name in NAMED:
        predicted = equal["predicted"][EVEN] / equal["predicted"][name]
        results.row(f"equal: {EVEN} / {name}", step_ratio=spread(ratios([equal], EVEN, name)), predicted=predicted)

    results.bar("speed-up over even 1F1B, unequal devices", median(speed_up[EVEN]), ">= 1.8")
    results.bar("speed-up over PyTorch's 1F1B, unequal devices", median(speed_up[TORCH]), ">= 1.8")
    results.bar("share of the bound, unequal devices", median(efficiency), ">= 0.88")
    results.bar("speed-up over PyTorch's 1F1B, equal devices", median(level), ">= 1.0")
    for name in NAMED:
        results.bar(f"speed-up of {name} over 1F1B, equal devices", median(ratios([equal], EVEN, name)), ">= 1.0")
    return results.write(options.json)


def report(results: Results, devices: str, job: dict[str, Any]) -> None:
    for way in (OURS, EVEN, *NAMED, TORCH, ALONE):
        if way not in job:
            continue
        predicted = job["predicted"].get(way)
        told = {} if predicted is None else {"predicted_s": predicted, "error": predicted / median(job[way]) - 1}
        results.row(f"{devices}: {way}", step_s=spread(job[way]), **told)


def worker(options: argparse.Namespace, size: Size) -> None:
    import torch

    import heterodyne as hd

    sys.path.insert(0, str(ROOT / "examples"))
    from gpt import build

    def model() -> torch.nn.Module:
        torch.manual_seed(0)
        return build(length=size.length, width=size.width, layers=size.layers, heads=4)

    tokens = torch.randint(0, 256, (COUNT * size.samples, size.length), generator=torch.Generator().manual_seed(1))
    batch = {"input_ids": tokens, "labels": tokens}

    with hd.open_session() as session:
        rig = Rig.of(session, model(), batch, (size.samples,), size.budget_s)
        rates = relative_rates(rig, size.samples)
        rig, planned = rig.planned()
        drafts = {OURS: planned, **hand_made(rig, size)}
        plans = {way: rig.agreed(plan) for way, plan in drafts.items() if way in options.ways}
        predicted = {way: rig.predicted(plan).step_s for way, plan in plans.items()}
        workers = {way: rig.worker(plan, model()) for way, plan in plans.items()}
        run: dict[str, Callable[[], object]] = {way: (lambda w=w: w.step(batch)) for way, w in workers.items()}
        if TORCH in options.ways:
            run[TORCH] = torch_pipeline(model(), tokens, session.rank, session.world_size)
        counts = [max(1, round(COUNT * rate / sum(rates))) for rate in rates]
        if ALONE in options.ways:
            run[ALONE] = alone(model(), tokens[: size.samples], counts[session.rank])
        found = in_rounds(
            {way: run[way] for way in options.ways}, session.communicator, rounds=size.rounds, steps=size.steps
        )
        ideal = [
            size.samples * sum(n / s for n, s in zip(counts, own, strict=True)) for own in found.own.get(ALONE, [])
        ]
        for made in workers.values():
            made.close()
        if session.rank == 0:
            facts = {"predicted": predicted, "ideal samples/s": ideal, "order": told(plans[OURS])}
            options.out.write_text(json.dumps({**found.seconds, **facts}))


def relative_rates(rig: Rig, samples: int) -> list[float]:
    """Of each device, one over the seconds of forward and backward of the whole model."""
    whole = (0, len(rig.captured.graph.ops))
    costs = [rig.costs.passes.of(device.id, whole, (samples,)) for device in rig.session.cluster.devices]
    return [1 / (stage.forward_s[0] + stage.backward_s[0]) for stage in costs]


def hand_made(rig: Rig, size: Size) -> dict[str, Plan]:
    """Even cuts of our own runtime, in named orders."""
    graph, cluster = rig.captured.graph, rig.session.cluster
    homes = tuple((device.id,) for device in cluster.devices)
    sizes = (size.samples,) * COUNT
    once = Line(homes=homes, parts=(1.0,) * len(homes), micro_batches=sizes)
    twice = Line(homes=homes + homes[::-1], parts=(1.0,) * 2 * len(homes), micro_batches=sizes)
    return {
        EVEN: plan_of(graph, cluster, [once], "1F1B", blocks_only=True),
        "ZBH2": plan_of(graph, cluster, [once], "ZBH2", blocks_only=True),
        "ZBVZeroBubble": plan_of(graph, cluster, [twice], "ZBVZeroBubble", blocks_only=True),
    }


def told(plan: Plan) -> str:
    return "; ".join(
        f"{sum(p.micro_batches.sizes)} samples over "
        + " > ".join(f"{' + '.join(s.devices)} {s.ops[1] - s.ops[0]} ops" for s in p.stages)
        for p in plan.pipelines
    )


def torch_pipeline(whole: torch.nn.Module, tokens: torch.Tensor, rank: int, ranks: int) -> Callable[[], object]:
    """A step of torch.distributed.pipelining: as many layers on each rank; the head has weights of its own."""
    import torch
    from torch import nn
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B
    from torch.nn import functional as F

    class Part(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            share = len(whole.layers) // ranks
            self.tokens = whole.tokens if rank == 0 else None
            self.positions = whole.positions if rank == 0 else None
            self.layers = nn.ModuleList(whole.layers[rank * share : (rank + 1) * share])
            self.norm = whole.norm if rank == ranks - 1 else None
            self.head = whole.head if rank == ranks - 1 else None

        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            if self.tokens is not None:
                hidden = self.tokens(hidden) + self.positions(torch.arange(hidden.shape[1]))
            for layer in self.layers:
                hidden = layer(hidden)
            return hidden if self.head is None else self.head(self.norm(hidden))

    def loss_of(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())

    part = Part()
    schedule = Schedule1F1B(PipelineStage(part, rank, ranks, torch.device("cpu")), COUNT, loss_fn=loss_of)
    optimizer = torch.optim.AdamW(part.parameters(), lr=1e-4, weight_decay=0.1, fused=True)

    def step() -> None:
        optimizer.zero_grad()
        if rank == 0:
            schedule.step(tokens)
        elif rank == ranks - 1:
            schedule.step(target=tokens)
        else:
            schedule.step()
        optimizer.step()

    return step


def alone(module: torch.nn.Module, part: torch.Tensor, count: int) -> Callable[[], object]:
    """Forward and backward of so many micro-batches, without anybody else."""

    def step() -> None:
        module.zero_grad()
        for _ in range(count):
            module(input_ids=part, labels=part).backward()

    return step


if __name__ == "__main__":
    given = worker_arguments()
    sys.exit(main() if given is None else worker(given, Size(**given.size)))

"""Hosts with 3, 2 and 1 workers and slow links between: what the planner makes of them against DDP and an even pipeline, side by side.

Emulated hosts (network namespaces, 200 Mb/s each) have workers of 0.38, 0.27 and 0.11 of a core. They train a GPT of 12 layers. Ways: the
plan of ``hd.distribute``, PyTorch's DDP over gloo with equal shares, and torch.distributed.pipelining with as many layers on each worker
and 1F1B. In every round each way trains one step after the other in the same processes. The loss of the plan's first step is compared
with that of the whole model on one device. It needs root, for namespaces.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import median

from emulation import emulated, in_rounds, ratios, worker_arguments
from results import ROOT, Results, arguments, spread
from uneven_pipeline import COUNT, Size, torch_pipeline

HOSTS = "3x0.38@200Mb/s,2x0.27@200Mb/s,1x0.11@200Mb/s"
OURS, DDP, TORCH = "ours", "DDP", "PyTorch 1F1B"


FULL = Size(width=256, layers=12, samples=3, length=64, rounds=4, steps=1, budget_s=30)
QUICK = Size(width=128, layers=6, samples=1, length=32, rounds=2, steps=1, budget_s=5)


def main() -> int:
    options = arguments(__doc__)
    results = Results("hosts")
    size = QUICK if options.quick else FULL
    found = emulated((), [OURS, DDP, TORCH], size, Path(__file__), hosts=HOSTS)
    error = found["predicted step_s"] / median(found[OURS]) - 1
    for way in (OURS, DDP, TORCH):
        told = {"predicted_s": found["predicted step_s"], "error": error, "plan": found["plan"]} if way == OURS else {}
        results.row(way, step_s=spread(found[way]), **told)
    for way in (DDP, TORCH):
        ratio = ratios([found], way, OURS)
        results.row(f"{way} / ours", step_ratio=spread(ratio))
        results.bar(f"speed-up over {way}", median(ratio), ">= 1.5")
    results.bar("prediction error of the step time", abs(error), "<= 0.08")
    results.bar("relative error of the first loss", abs(found["loss"] / found["loss of one device"] - 1), "<= 1e-5")
    return results.write(options.json)


def worker(options: argparse.Namespace, size: Size) -> None:
    import torch
    from torch.nn.parallel import DistributedDataParallel

    import heterodyne as hd
    from heterodyne.job import OptimizerSection

    sys.path.insert(0, str(ROOT / "examples"))
    from gpt import build

    def model() -> torch.nn.Module:
        torch.manual_seed(0)
        return build(length=size.length, width=size.width, layers=size.layers, heads=4)

    samples = COUNT * size.samples
    tokens = torch.randint(0, 256, (samples, size.length), generator=torch.Generator().manual_seed(1))
    batch = {"input_ids": tokens, "labels": tokens}
    with hd.open_session() as session:
        rank, ranks = session.rank, session.world_size
        ours = hd.distribute(
            model(),
            batch,
            optimizer=OptimizerSection(lr=1e-4),
            plan=hd.PlanOptions(measure_s=size.budget_s),
            clip_grad_norm=0.0,
            session=session,
        )
        loss = ours.step(batch).loss

        module = model()
        ddp = DistributedDataParallel(module)
        optimizer = torch.optim.AdamW(module.parameters(), lr=1e-4, weight_decay=0.1, fused=True)
        mine = tokens[rank * samples // ranks : (rank + 1) * samples // ranks]

        def ddp_step() -> None:
            optimizer.zero_grad()
            ddp(input_ids=mine, labels=mine).backward()
            optimizer.step()

        run: dict[str, Callable[[], object]] = {
            OURS: lambda: ours.step(batch),
            DDP: ddp_step,
            TORCH: torch_pipeline(model(), tokens, rank, ranks),
        }
        found = in_rounds(
            {way: run[way] for way in options.ways}, session.communicator, rounds=size.rounds, steps=size.steps
        )
        ours.close()
        if rank == 0:
            print(ours.explain(), flush=True)
            assert ours.plan.predicted is not None
            with torch.no_grad():
                whole = float(model()(input_ids=tokens, labels=tokens))
            facts = {"predicted step_s": ours.plan.predicted.step_s, "loss": loss, "loss of one device": whole}
            options.out.write_text(json.dumps({**found.seconds, **facts, "plan": str(ours.plan.pipelines)[:400]}))


if __name__ == "__main__":
    given = worker_arguments()
    sys.exit(main() if given is None else worker(given, Size(**given.size)))

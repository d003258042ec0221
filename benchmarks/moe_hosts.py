"""A mixture of experts over hosts with slow links: a row for each choice of a token, or each token once to each host.

Emulated hosts (network namespaces, 200 Mb/s each) with 2 and 2, or 3 and 2 workers train a Hugging Face Mixtral with 2 or 4 choices, both
ways in turns in the same processes: its experts are split over all workers and all else is replicated. Of n experts with e on a host
k choices reach it with 1 - C(n - e, k) / C(n, k), where rows of choices are k e / n: what crosses is in proportion. The cost model is
asked which way it takes. It needs root, for namespaces.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import median

from emulation import emulated, ratios, worker_arguments
from hand_made import Rig
from moe import BY_SPEED, Size, mixtral, plan_of
from pace import Pace, run_in_turns
from results import Results, arguments, spread

from heterodyne.plan.plan import Plan
from heterodyne.search.dispatch import with_cheaper_dispatch

DIRECT, ONCE = "a row for each choice", "once to each host"
HOSTS = {"2 + 2": "2x0.4@200Mb/s,2x0.4@200Mb/s", "3 + 2": "3x0.3@200Mb/s,2x0.3@200Mb/s"}

FULL = Size(width=256, inner=256, experts=12, layers=2, samples=30, length=64, rounds=5, steps=2, budget_s=40)
QUICK = Size(width=96, inner=96, experts=12, layers=1, samples=10, length=32, rounds=2, steps=2, budget_s=8)


def main() -> int:
    options = arguments(__doc__)
    results = Results("moe_hosts")
    size = QUICK if options.quick else FULL
    gains, lost = {}, []
    for name, hosts in HOSTS.items():
        for choices in (2, 4):
            shares = (1,) * sum(int(host[0]) for host in hosts.split(","))
            of = replace(size, shares=shares, choices=choices)
            job = emulated((), [DIRECT, ONCE], of, Path(__file__), hosts=hosts)
            for way in (DIRECT, ONCE):
                predicted = job["predicted"][way]
                error = predicted / median(job[way]) - 1
                results.row(
                    f"{name}, {choices} choices: {way}", step_s=spread(job[way]), predicted_s=predicted, error=error
                )
            found = ratios([job], DIRECT, ONCE)
            gains[name, choices] = median(found)
            lost.append(median(found) if job["chosen"] == DIRECT else 1 / median(found))
            results.row(
                f"{name}, {choices} choices: {DIRECT} / {ONCE}",
                step_ratio=spread(found),
                predicted=job["predicted"][DIRECT] / job["predicted"][ONCE],
                chosen=job["chosen"],
            )
    for (name, choices), gain in gains.items():
        if choices > 2:
            results.bar(f"once to each host over rows of choices, {name}, {choices} choices", gain, ">= 1.1")
    results.bar("the way that is chosen over the other one, at most", max(lost), "<= 1.05")
    return results.write(options.json)


def worker(options: argparse.Namespace, size: Size) -> None:
    import torch

    import heterodyne as hd

    tokens = torch.randint(0, 256, (size.samples, size.length), generator=torch.Generator().manual_seed(1))
    batch = {"input_ids": tokens, "labels": tokens}
    with hd.open_session() as session:
        part = size.samples // len(size.shares)
        rig = Rig.of(session, mixtral(size), batch, (part, size.samples), size.budget_s)
        direct = plan_of(rig, size, BY_SPEED)
        chosen = rig.agreed(_with(direct, None, rig))
        plans = {way: rig.agreed(_with(direct, way == ONCE, rig)) for way in options.ways}
        pace = Pace(rig, mixtral(size), {name: value[:part] for name, value in batch.items()})
        workers = {way: rig.worker(plan, mixtral(size)) for way, plan in plans.items()}
        run: dict[str, Callable[[], object]] = {way: (lambda w=w: w.step(batch)) for way, w in workers.items()}
        told = ONCE if chosen.pipelines[0].stages[0].hierarchical else DIRECT
        run_in_turns(rig, run, plans, pace, options.out, rounds=size.rounds, steps=size.steps, chosen=told)
        for made in workers.values():
            made.close()


def _with(plan: Plan, hierarchical: bool | None, rig: Rig) -> Plan:
    """The plan with that way, None: the one that the cost model takes."""
    (pipeline,) = plan.pipelines
    if hierarchical is None:
        return plan.model_copy(update={"pipelines": (with_cheaper_dispatch(rig.costs, pipeline),)})
    stages = tuple(stage.model_copy(update={"hierarchical": hierarchical}) for stage in pipeline.stages)
    return plan.model_copy(update={"pipelines": (pipeline.model_copy(update={"stages": stages}),)})


if __name__ == "__main__":
    own = worker_arguments()
    sys.exit(main() if own is None else worker(own, Size(**own.size)))

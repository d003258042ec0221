"""A head of 100,000 classes: replicated with the rest, or split beside a replicated backbone, on workers behind slow links.

Emulated workers (CPU quotas, each in a network namespace of its own behind a link of limited bandwidth) train a classifier, one way after
the other in the same processes. ``data``: every worker has the whole model, its gradients are summed. ``hybrid``: the backbone is
replicated and the head's classes are split, as its two annotations ask for (Whale, section 5.2.1, figure 13: 1.13x, 1.66x and 2.43x at
8, 16 and 32 V100s on 50 Gb/s). Which way to split the head's matrix is the planner's choice: by columns (SP1) or by rows (SP2); what both
would exchange is told beside.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from emulation import emulated, in_rounds, ratios, worker_arguments
from hand_made import Rig
from results import ROOT, Results, arguments, spread

from heterodyne.graph.sharding import shard
from heterodyne.plan.micro_batches import MicroBatches
from heterodyne.plan.plan import Layout, Pipeline, Plan, Region, Stage
from heterodyne.plan.sharded_stage import problem_of, shard_stage

if TYPE_CHECKING:
    import torch

    from heterodyne.cluster.spec import Cluster
    from heterodyne.graph.ir import ModelGraph

DATA, HYBRID = "data", "hybrid"
WORKERS = (2, 4)
SPEED = 0.4


@dataclass(frozen=True, kw_only=True)
class Size:
    """``samples`` of a worker; ``steps`` of each way in each of the ``rounds``; ``link``: of each worker."""

    classes: int
    width: int
    samples: int
    rounds: int
    steps: int
    link: str
    budget_s: float


FULL = Size(classes=100_000, width=256, samples=8, rounds=6, steps=1, link="1Gb/s", budget_s=40)
QUICK = Size(classes=10_000, width=64, samples=4, rounds=2, steps=2, link="1Gb/s", budget_s=5)


def main() -> int:
    options = arguments(__doc__)
    results = Results("large_head")
    size = QUICK if options.quick else FULL
    gains = {}
    for workers in WORKERS:
        job = emulated((SPEED,) * workers, [DATA, HYBRID], size, Path(__file__), links=size.link)
        for way in (DATA, HYBRID):
            predicted = job["predicted"][way]
            results.row(
                f"{workers} workers: {way}",
                step_s=spread(job[way]),
                predicted_s=predicted,
                error=predicted / median(job[way]) - 1,
            )
        gains[workers] = ratios([job], DATA, HYBRID)
        results.row(f"{workers} workers: {DATA} / {HYBRID}", step_ratio=spread(gains[workers]))
        results.row(f"{workers} workers: the head's matrix", **job["split"])
    results.bar("hybrid over data parallelism, 4 workers", median(gains[4]), ">= 1.13")
    results.bar("what it gains at 4 workers over what it gains at 2", median(gains[4]) / median(gains[2]), ">= 1.0")
    return results.write(options.json)


def worker(options: argparse.Namespace, size: Size) -> None:
    import torch

    import heterodyne as hd

    sys.path.insert(0, str(ROOT / "examples"))
    from classify_100k import Classifier, batch

    with hd.open_session() as session:
        world = session.world_size

        def model() -> torch.nn.Module:
            torch.manual_seed(0)
            return Classifier(size.classes, size.width, world)

        together = batch(0, size.samples * world, size.classes)
        rig = Rig.of(session, model(), together, (size.samples, size.samples * world), size.budget_s)
        graph, cluster = rig.captured.graph, session.cluster
        plans = {DATA: data(graph, cluster, size.samples), HYBRID: hybrid(graph, cluster, size.samples)}
        predicted = {way: rig.predicted(plan).step_s for way, plan in plans.items()}
        made = {way: rig.worker(plan, model()) for way, plan in plans.items()}
        run: dict[str, Callable[[], object]] = {way: (lambda w=w: w.step(together)) for way, w in made.items()}
        found = in_rounds(run, session.communicator, rounds=size.rounds, steps=size.steps)
        for own in made.values():
            own.close()
        if session.rank == 0:
            facts = {"predicted": predicted, "split": ways_to_split(graph, plans[HYBRID])}
            options.out.write_text(json.dumps({**found.seconds, **facts}))


def data(graph: ModelGraph, cluster: Cluster, samples: int) -> Plan:
    """The whole model on each device, for so many samples each."""
    pipelines = tuple(
        Pipeline(
            micro_batches=MicroBatches((samples,)),
            stages=(Stage(ops=(0, len(graph.ops)), devices=(d.id,), regions=(Region(layout=Layout(shares=(1,))),)),),
        )
        for d in cluster.devices
    )
    return plan_of(graph, cluster, samples, pipelines)


def hybrid(graph: ModelGraph, cluster: Cluster, samples: int) -> Plan:
    """As the annotations have it, in equal parts."""
    devices = tuple(d.id for d in cluster.devices)
    equal = (1,) * len(devices)
    marked = [
        Region(task_graph=task_graph.name, layout=Layout(kind=task_graph.kind, shares=equal))
        for task_graph in graph.task_graphs
    ]
    stage = Stage(ops=(0, len(graph.ops)), devices=devices, regions=(Region(layout=Layout(shares=equal)), *marked))
    pipeline = Pipeline(micro_batches=MicroBatches((samples * len(devices),)), stages=(stage,))
    return plan_of(graph, cluster, samples, (pipeline,))


def plan_of(graph: ModelGraph, cluster: Cluster, samples: int, pipelines: tuple[Pipeline, ...]) -> Plan:
    return Plan(
        model=graph.fingerprint,
        cluster=cluster.fingerprint,
        global_batch_size=samples * len(cluster.devices),
        pipelines=pipelines,
    )


def ways_to_split(graph: ModelGraph, plan: Plan) -> dict[str, Any]:
    """What the head's linear layer was cut by, and the bytes that a step exchanges so, and if that way were forbidden."""
    (pipeline,) = plan.pipelines
    chosen = shard_stage(graph, pipeline, 0)
    assert chosen is not None
    samples = pipeline.micro_batches.samples
    head = next(op for op in reversed(graph.ops) if op.kind == "linear")
    problem, shares, fixed = problem_of(graph, pipeline.stages[0], (0,), 0, max(pipeline.micro_batches.sizes))
    letter = chosen.strategies[head.name].name
    other = shard(replace(problem, forbidden=frozenset({(head.name, letter)})), shares, fixed)
    names = {"o": "SP1, columns", "k": "SP2, rows"}
    told = {}
    for name, sharding in (("chosen", chosen), ("else", other)):
        exchanged = sum(e.bytes(samples) * (bool(e.steps.forward) + bool(e.steps.backward)) for e in sharding.exchanges)
        told[name] = names.get(sharding.strategies[head.name].name, sharding.strategies[head.name].name)
        told[f"{name}_kib"] = round(exchanged / 1024)
    return told


if __name__ == "__main__":
    own = worker_arguments()
    sys.exit(main() if own is None else worker(own, Size(**own.size)))

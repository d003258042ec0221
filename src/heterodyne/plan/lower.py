"""A plan becomes a program: what each rank does in one optimizer step, in order.

For one stage a pipeline, every schedule is the same: forward and backward of one micro-batch after the other, so that one
micro-batch of activations is alive at a time. Then the gradient buckets, in the order in which the backward completes them.
A pipeline without a share runs no micro-batch, but takes part in every reduction and makes the same update as the others.
"""

from __future__ import annotations

from heterodyne.cluster.spec import Cluster
from heterodyne.graph.ir import ModelGraph
from heterodyne.plan.buckets import gradient_buckets
from heterodyne.plan.check import require_valid
from heterodyne.plan.plan import Plan
from heterodyne.plan.program import Action, Program
from heterodyne.plan.verify import require_runnable

__all__ = ["lower"]


def lower(plan: Plan, graph: ModelGraph, cluster: Cluster, *, clip: bool = True) -> Program:
    """The program of a plan; ``clip`` adds gradient clipping. Raises PlanError with every rule that the plan breaks."""
    require_valid(plan, graph, cluster)
    buckets = len(gradient_buckets(graph, plan.bucket_bytes))
    ranks: list[tuple[Action, ...]] = [()] * len(cluster.devices)
    micro_batches: list[int | None] = [None] * len(cluster.devices)
    for pipeline in plan.pipelines:
        (stage,) = pipeline.stages
        (device,) = stage.devices
        rank = cluster.rank(device)
        micro_batches[rank] = len(pipeline.micro_batches)
        ranks[rank] = _actions(len(pipeline.micro_batches), buckets, clip=clip)
    program = Program(ranks=tuple(ranks))
    require_runnable(program, micro_batches, buckets)
    return program


def _actions(micro_batches: int, buckets: int, *, clip: bool) -> tuple[Action, ...]:
    passes = [Action(0, kind, index) for index in range(micro_batches) for kind in ("F", "B")]
    reductions = [Action(0, "REDUCE_GRAD", index) for index in range(buckets)]
    return (*passes, *reductions, *([Action(0, "CLIP")] if clip else []), Action(0, "STEP"))

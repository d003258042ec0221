"""A plan becomes a program: what each rank does in one optimizer step, in order.

For one stage a pipeline, every schedule is the same: forward and backward of one micro-batch after the other, so that one
micro-batch of activations is alive at a time. Then the gradient buckets, in the order in which the backward completes them.
"""

from __future__ import annotations

from heterodyne.cluster.spec import Cluster
from heterodyne.graph.ir import ModelGraph
from heterodyne.plan.buckets import gradient_buckets
from heterodyne.plan.check import require_valid
from heterodyne.plan.plan import Plan
from heterodyne.plan.program import Action, Program

__all__ = ["lower"]


def lower(plan: Plan, graph: ModelGraph, cluster: Cluster, *, clip: bool = True) -> Program:
    """The program of a plan; ``clip`` adds gradient clipping. Raises PlanError with every rule that the plan breaks."""
    require_valid(plan, graph, cluster)
    buckets = gradient_buckets(graph, plan.bucket_bytes)
    ranks: list[tuple[Action, ...]] = [()] * len(cluster.devices)
    for pipeline in plan.pipelines:
        (stage,) = pipeline.stages
        (device,) = stage.devices
        actions = [
            action
            for micro_batch in range(len(pipeline.micro_batches))
            for action in (Action(0, "F", micro_batch), Action(0, "B", micro_batch))
        ]
        actions += [Action(0, "REDUCE_GRAD", bucket.index) for bucket in buckets]
        actions += [Action(0, "CLIP")] if clip else []
        actions += [Action(0, "STEP")]
        ranks[cluster.rank(device)] = tuple(actions)
    return Program(ranks=tuple(ranks))

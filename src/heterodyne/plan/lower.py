"""A plan becomes a program: what each rank does in one optimizer step, in order.

A schedule says what the devices of each place compute, and in which order. Lowering adds what follows from it: before a stage
runs it receives what other places send, behind it it sends what others read; forward activations, backward gradients. Then the
gradient buckets, in the order in which the backward completes them, each between the devices that own its parameters; where these shard
its state, each sums and updates its own range, and the new weights are gathered in the order in which the forward reads them; or, where
parameters are sharded too, before the passes of each stage (see `heterodyne.plan.unsharding`).
A pipeline without a share runs no micro-batch, but takes part in every reduction and makes the same update as the others.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from heterodyne.cluster.spec import Cluster
from heterodyne.graph.ir import ModelGraph
from heterodyne.plan.check import require_valid
from heterodyne.plan.order import orders_of
from heterodyne.plan.plan import Plan
from heterodyne.plan.program import Action, Program
from heterodyne.plan.traffic import Traffic, duties
from heterodyne.plan.unsharding import with_unsharding
from heterodyne.plan.verify import require_runnable

__all__ = ["lower"]


def lower(plan: Plan, graph: ModelGraph, cluster: Cluster, *, clip: bool = True) -> Program:
    """The program of a plan; ``clip`` adds gradient clipping. Raises PlanError with every rule that the plan breaks."""
    require_valid(plan, graph, cluster)
    wanted = duties(plan, graph, cluster)
    ranks: list[tuple[Action, ...]] = [()] * len(cluster.devices)
    for pipeline in plan.pipelines:
        for devices, order in zip(pipeline.places, orders_of(plan.schedule, pipeline), strict=True):
            for device in devices:
                duty = wanted[cluster.rank(device)]
                assert duty is not None  # it is in a pipeline
                passes = tuple(_with_traffic(order, duty.traffic))
                if plan.zero > 2:
                    passes = with_unsharding(passes, duty.readers)
                ranks[cluster.rank(device)] = (*passes, *_update(duty.buckets, clip=clip, zero=plan.zero))
    program = Program(ranks=tuple(ranks))
    require_runnable(program, wanted)
    return program


def _update(buckets: Iterable[int], *, clip: bool, zero: int) -> Iterator[Action]:
    """The end of a step: gradients are summed, weights updated."""
    for index in buckets if zero < 3 else ():
        yield Action(0, "SCATTER" if zero else "REDUCE_GRAD", index)
    if clip:
        yield Action(0, "CLIP")
    yield Action(0, "STEP")
    if zero in (1, 2):
        # What the next forward reads first comes first.
        yield from (Action(0, "GATHER", index) for index in reversed(tuple(buckets)))


def _with_traffic(order: Iterable[Action], traffic: Traffic) -> Iterator[Action]:
    """What has to come before and what can leave behind each action."""
    for action in order:
        stage, index = action.stage, action.index
        if action.kind == "F" and stage in traffic.receives:
            yield Action(stage, "RECV_F", index)
        if action.kind in ("B", "I") and stage in traffic.gets_back:
            yield Action(stage, "RECV_B", index)
        yield action
        if action.kind == "F" and stage in traffic.sends:
            yield Action(stage, "SEND_F", index)
        if action.kind in ("B", "I") and stage in traffic.gives_back:
            yield Action(stage, "SEND_B", index)

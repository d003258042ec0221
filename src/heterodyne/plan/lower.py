"""A plan becomes a program: what each rank does in one optimizer step, in order.

A schedule says what the devices of each place compute, and in which order. Lowering adds what follows from it: before a stage
runs it receives what other places send, behind it it sends what others read; forward activations, backward gradients. Activations that
wait on the host leave and come back between the passes (see `heterodyne.plan.offloading`). Then the
gradient buckets, in the order in which the backward completes them, each between the devices that own its parameters; where these shard
its state, each sums and updates its own range, and the new weights are gathered in the order in which the forward reads them; or, where
parameters are sharded too, before the passes that read them (see `heterodyne.plan.unsharding`).
A pipeline without a share runs no micro-batch, but takes part in every reduction and makes the same update as the others.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from heterodyne.cluster.spec import Cluster
from heterodyne.errors import PlanError
from heterodyne.graph.ir import ModelGraph
from heterodyne.plan.check import require_valid
from heterodyne.plan.offloading import with_offload
from heterodyne.plan.order import orders_of
from heterodyne.plan.plan import Plan
from heterodyne.plan.program import Action, Program
from heterodyne.plan.traffic import RankSpec, Traffic, duties
from heterodyne.plan.unsharding import Passes, with_unsharding
from heterodyne.plan.verify import require_runnable

__all__ = ["lower"]


def lower(
    plan: Plan, graph: ModelGraph, cluster: Cluster, *, clip: bool = True, traffic: Sequence[Traffic] | None = None
) -> Program:
    """The program of a plan; ``clip`` adds gradient clipping. Raises PlanError with every rule that the plan breaks.

    ``traffic``: of each pipeline, where the graph that runs is another than that of which gradients are reduced.
    """
    require_valid(plan, graph, cluster)
    wanted = duties(plan, graph, cluster, traffic)
    passes = _passes(plan, cluster, wanted)
    program = _program(passes, wanted, clip=clip)
    try:
        require_runnable(program, wanted)
    except PlanError:
        if plan.zero < 3:
            raise
        # Gathers may make ranks wait for each other that wait for messages too. Not if they come first.
        program = _program(passes, wanted, clip=clip, ahead=True)
        require_runnable(program, wanted)
    return program


def _passes(plan: Plan, cluster: Cluster, wanted: Sequence[RankSpec | None]) -> tuple[tuple[Action, ...], ...]:
    """Of each rank what it computes, receives and sends."""
    ranks: list[tuple[Action, ...]] = [()] * len(cluster.devices)
    for pipeline in plan.pipelines:
        for devices, order in zip(pipeline.places, orders_of(plan.schedule, pipeline), strict=True):
            for rank in map(cluster.rank, devices):
                duty = wanted[rank]
                assert duty is not None  # it is in a pipeline
                ranks[rank] = tuple(_with_traffic(with_offload(order, duty.hosted), duty.traffic))
    return tuple(ranks)


def _program(
    passes: Sequence[Sequence[Action]], wanted: Sequence[RankSpec | None], *, clip: bool, ahead: bool = False
) -> Program:
    """With parameters that are gathered, and the update; ``ahead``: all are gathered before the first pass."""
    whole = passes
    if any(duty is not None and duty.zero > 2 for duty in wanted):
        whole = with_unsharding(
            [
                None if duty is None else Passes(actions=own, readers=duty.readers, kept=duty.kept)
                for own, duty in zip(passes, wanted, strict=True)
            ],
            ahead=ahead,
        )
    ends = (() if duty is None else _update(duty.buckets, clip=clip, zero=duty.zero) for duty in wanted)
    return Program(ranks=tuple((*own, *end) for own, end in zip(whole, ends, strict=True)))


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

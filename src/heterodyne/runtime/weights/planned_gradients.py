"""What follows from a plan for the gradients of a rank: the process groups of its buckets, and when gradients are complete."""

from __future__ import annotations

from heterodyne.plan.buckets import Bucket
from heterodyne.plan.lower import Lowered
from heterodyne.plan.state_shards import Range
from heterodyne.runtime.assignment import Assignment
from heterodyne.runtime.comm.process_group import ProcessGroup

__all__ = ["bucket_channels", "completed_gradients", "ranges_by_rank"]


def bucket_channels(assignment: Assignment) -> list[tuple[Bucket, ProcessGroup | None]]:
    """Every bucket of the plan with the process group between its owners; None on ranks that are none of them. Collective."""
    buckets, rank = assignment.lowered.weights.buckets, assignment.lowered.cluster.rank
    process_groups: dict[tuple[str, ...], ProcessGroup | None] = {}
    for bucket in buckets:
        if bucket.owners not in process_groups:
            process_groups[bucket.owners] = assignment.communicator.process_group(sorted(map(rank, bucket.owners)))
    return [(bucket, process_groups[bucket.owners]) for bucket in buckets]


def ranges_by_rank(lowered: Lowered) -> dict[int, tuple[Range, ...]]:
    """Of each bucket whose state is sharded, by its number, the ranges of its owners in the order of their ranks."""
    return {
        number: tuple(bucket.ranges[device] for device in sorted(bucket.ranges, key=lowered.cluster.rank))
        for number, bucket in lowered.weights.sharded.items()
    }


def completed_gradients(assignment: Assignment) -> dict[int, frozenset[str]]:
    """For each stage of a rank, the parameters whose gradients its last whole backward completes.

    A parameter that several of them read is completed by the one that comes last. One that is read where backwards come in
    halves is completed by none: its gradient is there when the last half is done.
    """
    role, actions, ops = assignment.role, assignment.actions, assignment.lowered.graph.ops
    held = dict(zip(role.stages, role.held, strict=True))
    last = {action.stage: number for number, action in enumerate(actions) if action.kind in ("B", "W")}
    by: dict[str, int] = {}
    for stage in sorted(last, key=last.__getitem__):
        for op in ops[slice(*held[stage].ops)]:
            by.update(dict.fromkeys(op.parameters, stage))
    halves = {action.stage for action in actions if action.kind == "W"}
    in_halves = {name for stage in halves for op in ops[slice(*held[stage].ops)] for name in op.parameters}
    return {
        stage: frozenset(name for name, of in by.items() if of == stage and name not in in_halves) for stage in last
    }

"""Peak bytes of unsharded gradients and parameters on a device under ZeRO-2 and ZeRO-3, beside its own shards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from heterodyne.cost.memory import MemoryUse
from heterodyne.plan.buckets import BUCKETS_UNDER_WAY, Bucket, stages_reading
from heterodyne.plan.order import orders_of
from heterodyne.plan.plan import Plan
from heterodyne.plan.program import Action
from heterodyne.plan.unsharding import Passes, with_unsharding

if TYPE_CHECKING:
    from heterodyne.cost.model import CostModel

__all__ = ["UnshardedBytes", "gathered", "shared_out"]


@dataclass(frozen=True, kw_only=True, slots=True)
class UnshardedBytes:
    """Peak bytes on one device. ``parameters``: all-gathered; ``gradients``: not yet reduced."""

    parameters: int
    gradients: int


def gathered(
    order: Sequence[Action], buckets: Sequence[Bucket], readers: Mapping[int, Sequence[int]]
) -> UnshardedBytes:
    """Of a device that runs these actions in order.

    ``buckets``: those that it shares; ``readers``: for each the stages of the device that read it.

    A gradient bucket lives from the first backward that reads it until it is reduced behind the last one; with a single backward,
    buckets fill one after the other.
    """
    size = {bucket.index: bucket.bytes for bucket in buckets}
    largest = (1 + BUCKETS_UNDER_WAY) * max(size.values(), default=0)
    backwards = [action.stage for action in order if action.kind in ("B", "W")]
    (actions,) = with_unsharding([Passes(actions=order, readers={bucket: readers.get(bucket, ()) for bucket in size})])
    open_: set[int] = set()
    there = whole = gradients = 0
    for action in actions:
        bucket = action.index or 0
        if action.kind == "UNSHARD":
            there += size[bucket]
            whole = max(whole, there)
        elif action.kind == "RESHARD":
            there -= size[bucket]
        elif action.kind in ("B", "W"):
            open_ |= {bucket for bucket, stages in readers.items() if action.stage in stages}
            gradients = max(gradients, sum(map(size.__getitem__, open_)))
        elif action.kind == "SCATTER":
            open_.discard(bucket)
    in_turn = len(backwards) == len(set(backwards))
    gradients = min(sum(size.values()), largest if in_turn else gradients + largest)
    return UnshardedBytes(parameters=whole, gradients=gradients)


def shared_out(
    model: CostModel, use: MemoryUse, plan: Plan, device: str, buckets: Sequence[Bucket], state: float
) -> MemoryUse:
    """With what it shares with others: where gradients are sharded too, or parameters, it keeps that part of them."""
    if plan.zero == 1:
        return use if model.cluster.device(device).backend == "cpu" else use.with_sums(state)
    shared = [bucket for bucket in buckets if device in bucket.owners and len(bucket.owners) > 1]
    pipeline = next(p for p in plan.pipelines if any(device in stage.devices for stage in p.stages))
    mine = [n for n, stage in enumerate(pipeline.stages) if device in stage.devices]
    reads = stages_reading(pipeline, model.graph)
    readers = {b.index: [n for n in mine if not reads[n].isdisjoint(b.parameters)] for b in shared}
    place = pipeline.place_of_stage[mine[0]]
    whole = gathered(orders_of(plan.schedule, pipeline)[place], shared, readers)
    trained = sum(bucket.bytes for bucket in shared) if plan.zero > 2 else 0
    parameters = whole.parameters if plan.zero > 2 else 0
    again = any(pipeline.stages[number].recompute for number in mine)
    return use.shared_out(state, gradients=whole.gradients, parameters=parameters, trained=trained, again=again)

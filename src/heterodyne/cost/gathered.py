"""What a device holds at once of gradients and parameters that it shares out with others (ZeRO-2 and ZeRO-3), beside its own part."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from heterodyne.plan.buckets import BUCKETS_UNDER_WAY, Bucket
from heterodyne.plan.program import Action
from heterodyne.plan.unsharding import with_unsharding

__all__ = ["Gathered", "gathered"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Gathered:
    """Bytes of one device, at most at a time. ``parameters``: that are gathered; ``gradients``: that are not yet reduced."""

    parameters: int
    gradients: int


def gathered(order: Sequence[Action], buckets: Sequence[Bucket], readers: Mapping[int, Sequence[int]]) -> Gathered:
    """Of a device that computes in this order.

    ``buckets``: those that it shares; ``readers``: of each the stages of the device that read it.

    A bucket of gradients is there from the first backward that reads it until it is reduced behind the last one; if there is but one
    backward, buckets fill one after the other.
    """
    size = {bucket.index: bucket.bytes for bucket in buckets}
    largest = (1 + BUCKETS_UNDER_WAY) * max(size.values(), default=0)
    of_stage: dict[int, set[int]] = {}
    for bucket in size:
        for stage in readers.get(bucket, ()):
            of_stage.setdefault(stage, set()).add(bucket)
    backwards = [action.stage for action in order if action.kind in ("B", "W")]
    users: dict[int, set[int]] = {bucket: set() for bucket in size}
    open_: set[int] = set()
    whole = gradients = 0
    for action in with_unsharding(order, readers):
        own = of_stage.get(action.stage, set())
        if action.kind == "UNSHARD":
            for bucket in own:
                users[bucket].add(action.stage)
            whole = max(whole, sum(size[bucket] for bucket, of in users.items() if of))
        elif action.kind == "RESHARD":
            for bucket in own:
                users[bucket].discard(action.stage)
        elif action.kind in ("B", "W"):
            open_ |= own
            gradients = max(gradients, sum(map(size.__getitem__, open_)))
        elif action.kind == "SCATTER" and action.index is not None:
            open_.discard(action.index)
    in_turn = len(backwards) == len(set(backwards))
    gradients = min(sum(size.values()), largest if in_turn else gradients + largest)
    return Gathered(parameters=whole, gradients=gradients)

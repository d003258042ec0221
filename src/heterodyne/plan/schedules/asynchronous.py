"""1F1B that is not flushed between batches (PipeDream-2BW: Narayanan et al., ICML 2021), for weights that are predicted (XPipe: Guan et
al., arXiv 1911.04610).

The orders are those of 1F1B for one batch; `depth_of` a place is the number of its forwards before the first backward, less one. In the
steady state (`steady`) a place with depth d runs the backward of micro-batch j - d behind the forward of micro-batch j. Where j - d is
negative that is one of the batch before, whose update follows on its last one. So the first d forwards of each batch run before the
update of the batch before: they take weights that are predicted one update ahead, and no place waits for a batch to end.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from heterodyne.plan.program import Action
from heterodyne.plan.schedules.one_f_one_b import ONE_F_ONE_B
from heterodyne.plan.schedules.row import Row
from heterodyne.plan.schedules.schedule import Schedule

__all__ = [
    "ASYNCHRONOUS",
    "INEXACT",
    "IN_WORDS",
    "ahead",
    "depth_of",
    "drained",
    "predicted_versions",
    "steady",
    "unrolled",
]

ASYNCHRONOUS = Schedule(name="Async1F1B", placement="loop", chunks=1, make=ONE_F_ONE_B.make, asynchronous=True)

IN_WORDS = "not flushed between steps, with predicted weights (inexact)"
INEXACT = (
    "INEXACT, as asked for (parallelism.async): steps are not flushed, and some forwards read weights that are predicted by one update; "
    "the losses are not those of one device"
)
"""What plans and tables say of such a pipeline, and runs of themselves."""

_FORWARD, _BACKWARD = ("RECV_F", "F", "SEND_F"), ("RECV_B", "R", "B", "SEND_B")


def depth_of(actions: Iterable[Action]) -> int:
    """Return how many micro-batches of the next batch a place runs forward before it updates its weights."""
    forwards = 0
    for action in actions:
        if action.kind == "B":
            return forwards - 1
        forwards += action.kind == "F"
    return 0


def ahead(stage: int, depth: int, micro_batches: int) -> tuple[Action, ...]:
    """Return the order of a stage for one batch: so many forwards, then a forward and a backward in turn, as 1F1B has it."""
    row = Row(micro_batches)
    for _ in range(depth):
        row.forward(stage)
    for _ in range(micro_batches):
        row.forward(stage)
        row.backward(stage)
    return row.actions


def steady(actions: Sequence[Action]) -> tuple[Action, ...]:
    """Return what a rank does from one batch to the next, given its actions for one batch; none for an idle rank."""
    depth, count = depth_of(actions), sum(action.kind == "F" for action in actions)
    forward, backward = (
        [[a for a in actions if a.kind in kinds and a.index == index] for index in range(count)]
        for kinds in (_FORWARD, _BACKWARD)
    )
    update = [action for action in actions if action.kind not in (*_FORWARD, *_BACKWARD)]
    found: list[Action] = []
    for index in range(count):
        behind = index - depth
        found += forward[index]
        found += (replace(action, index=behind) for action in backward[behind])
        found += update if behind % count == count - 1 else ()
    return tuple(found)


def drained(actions: Iterable[Action]) -> tuple[Action, ...]:
    """Return what is left to do of a batch behind which none follows."""
    left = [action for action in actions if action.index is None or action.index < 0]
    return tuple(left) if len(left) > 1 else ()


def unrolled(actions: Sequence[Action], batches: int) -> tuple[Action, ...]:
    """Return the actions of the first so many batches, whose micro-batches are counted on from batch to batch."""
    count = sum(action.kind == "F" for action in actions)
    found: list[Action] = []
    for batch in range(batches):
        for action in actions:
            if action.index is not None and batch * count + action.index >= 0:
                found.append(replace(action, index=batch * count + action.index))
            elif action.index is None and any(a.kind == "B" for a in found):
                found.append(action)
    return tuple(found)


def predicted_versions(depth: int, micro_batches: int) -> int:
    """Return how many predicted versions of its weights a place holds at a time: the one of a batch stays until its last backward that
    needs it, by when the next batch may have begun.
    """
    if not depth:
        return 0
    return 1 if 2 * depth <= micro_batches else 2

"""The shifted critical path (Lai et al., "Merak", IEEE TPDS 2023, section 5): 1F1B with recompute that does not wait for gradients.

What a stage did not keep it computes again (R) before it waits for the gradient, not after. The last stage would run its backward
at once, so it keeps everything. The last stage but one is then the one that others wait for; it starts with three forwards
and two backwards, after which it never waits. With R as long as F and F + B = 3 F, a step takes (p+2) R less than 1F1B with
recompute inside every backward.
"""

from __future__ import annotations

from heterodyne.plan.program import Action
from heterodyne.plan.schedules.row import Row
from heterodyne.plan.schedules.schedule import Orders, Schedule

__all__ = ["SHIFTED_CRITICAL_PATH", "recomputed_ahead"]


def _orders(places: int, chunks: int, micro_batches: int) -> Orders:
    stages = places * chunks
    plain = tuple(_place(stage, stages, micro_batches) for stage in range(stages))
    return recomputed_ahead(plain, range(stages - 1))


def _place(stage: int, stages: int, micro_batches: int) -> tuple[Action, ...]:
    row = Row(micro_batches)
    if stage == stages - 2:
        for _ in range(3):
            row.forward(stage)
        row.backward(stage)
        for _ in range(micro_batches):
            row.backward(stage)
            row.forward(stage)
        return row.actions
    for _ in range(stages - 1 - stage):
        row.forward(stage)
    for _ in range(micro_batches):
        row.forward(stage)
        row.backward(stage)
    return row.actions


def recomputed_ahead(orders: Orders, stages: range | frozenset[int]) -> Orders:
    """The same orders with an R straight before each backward of these stages that has none yet: it never takes longer."""
    return tuple(_with_recompute(row, stages) for row in orders)


def _with_recompute(row: tuple[Action, ...], stages: range | frozenset[int]) -> tuple[Action, ...]:
    there = {action for action in row if action.kind == "R"}
    more: list[Action] = []
    for action in row:
        again = Action(action.stage, "R", action.index)
        if action.kind in ("B", "I") and action.stage in stages and again not in there:
            more.append(again)
        more.append(action)
    return tuple(more)


SHIFTED_CRITICAL_PATH = Schedule(name="ShiftedCriticalPath", placement="loop", chunks=1, make=_orders)

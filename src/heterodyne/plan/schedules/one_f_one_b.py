"""1F1B (PipeDream-Flush; Narayanan et al., ICML 2021): after a warm-up, a forward and a backward in turn.

Bubble (p-1)/(m+p-1) as GPipe, but place r holds min(m, p-r) micro-batches only.
"""

from __future__ import annotations

from heterodyne.plan.program import Action
from heterodyne.plan.schedules.row import Row
from heterodyne.plan.schedules.schedule import Orders, Schedule

__all__ = ["ONE_F_ONE_B"]


def _orders(places: int, chunks: int, micro_batches: int) -> Orders:
    return tuple(_place(place, places - place, micro_batches) for place in range(places * chunks))


def _place(stage: int, held: int, micro_batches: int) -> tuple[Action, ...]:
    row = Row(micro_batches)
    for _ in range(held - 1):
        row.forward(stage)
    for _ in range(micro_batches):
        row.forward(stage)
        row.backward(stage)
    return row.actions


ONE_F_ONE_B = Schedule(name="1F1B", placement="loop", chunks=1, make=_orders)

"""ZB-H1 (Qi et al., "Zero Bubble Pipeline Parallelism", ICLR 2024, section 2.2): 1F1B with the backward in two halves.

The gradients of the inputs (I) go on at once; place r owes the gradients of r micro-batches' weights (W), and computes them at
the end, where 1F1B waits. Bubble (p-1)(F+I-W), which is a third of that of 1F1B where F = I = W. No place holds more than
the first one does in 1F1B, p micro-batches.
"""

from __future__ import annotations

from heterodyne.plan.program import Action
from heterodyne.plan.schedules.row import Row
from heterodyne.plan.schedules.schedule import Orders, Schedule

__all__ = ["ZB_H1"]


def _orders(places: int, chunks: int, micro_batches: int) -> Orders:
    return tuple(_place(stage, places * chunks, micro_batches) for stage in range(places * chunks))


def _place(stage: int, stages: int, micro_batches: int) -> tuple[Action, ...]:
    row = Row(micro_batches)
    for _ in range(stages - 1 - stage):
        row.forward(stage)
    for _ in range(micro_batches):
        row.forward(stage)
        row.input(stage)
        if row.owed > stage:
            row.weight()
    row.weights()
    return row.actions


ZB_H1 = Schedule(name="ZBH1", placement="loop", chunks=1, make=_orders, halves=True)

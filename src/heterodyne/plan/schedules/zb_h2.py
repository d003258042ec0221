"""ZB-H2 (Qi et al., "Zero Bubble Pipeline Parallelism", ICLR 2024, section 2.3): no bubble, for twice the activations.

Place r runs forwards until the first gradient comes, which is 2(p-r)-1 of them where F = I = W, and owes the weight gradients of
2r micro-batches. From its first action to its last it then never waits; only the skew between the places is left.
"""

from __future__ import annotations

from heterodyne.plan.program import Action
from heterodyne.plan.schedules.row import Row
from heterodyne.plan.schedules.schedule import Orders, Schedule

__all__ = ["ZB_H2"]


def _orders(places: int, chunks: int, micro_batches: int) -> Orders:
    return tuple(_place(stage, places * chunks, micro_batches) for stage in range(places * chunks))


def _place(stage: int, stages: int, micro_batches: int) -> tuple[Action, ...]:
    row = Row(micro_batches)
    for _ in range(2 * (stages - stage) - 1):
        row.forward(stage)
    for _ in range(micro_batches):
        row.input(stage)
        row.forward(stage)
        if row.owed > 2 * stage:
            row.weight()
    row.weights()
    return row.actions


ZB_H2 = Schedule(name="ZBH2", placement="loop", chunks=1, make=_orders, halves=True)

"""ZBV (Qi et al., "Zero Bubble Pipeline Parallelism", ICLR 2024, section 6): no bubble with the activations of 1F1B.

Two stages on each place, the second half of the model coming back the way that the first one went. The last stage shares its place
with stage 0, so the loss is computed where the pipeline begins, and the first gradient is not far from anyone.
Without a bubble where F = I = W and there are at least 2p-1 micro-batches.
"""

from __future__ import annotations

from heterodyne.plan.program import Action
from heterodyne.plan.schedules.row import Row
from heterodyne.plan.schedules.schedule import Orders, Schedule

__all__ = ["ZBV"]


def _orders(places: int, chunks: int, micro_batches: int) -> Orders:
    return tuple(_place(place, places, chunks * places - 1 - place, micro_batches) for place in range(places))


def _place(down: int, places: int, up: int, micro_batches: int) -> tuple[Action, ...]:
    """``down``: the stage of the first half, which is also the number of the place; ``up``: that of the second half."""
    row = Row(micro_batches)
    left = places - down
    for _ in range(2 * left - 1):
        row.forward(down)
    for _ in range(down):
        row.forward(up)
        row.forward(down)
    for _ in range(left):
        row.forward(up)
        row.input(up)
        row.weight(up)
    for _ in range(max(micro_batches, 2 * places - 1) - places):
        row.forward(down)
        row.input(down)
        row.weight(down)
        row.forward(up)
        row.input(up)
        row.weight(up)
    for _ in range(down):
        row.input(down)
        row.input(up)
    for _ in range(left):
        row.input(down)
        row.weight(down)
    row.weights(up)
    row.weights(down)
    return row.actions


ZBV = Schedule(name="ZBVZeroBubble", placement="v", chunks=2, make=_orders, halves=True)

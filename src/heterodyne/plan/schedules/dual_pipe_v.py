"""DualPipeV (DeepSeek-AI's DualPipe, cut in half along its symmetry): two stages on each place, in V order.

A forward of one half of the model stands beside a backward of the other, so that on devices that can overlap the two the
communication of one hides behind the computation of the other. Here they stand one after the other. Written for at least 2p
micro-batches; with fewer, those that lack are left out.
"""

from __future__ import annotations

from heterodyne.plan.program import Action
from heterodyne.plan.schedules.row import Row
from heterodyne.plan.schedules.schedule import Orders, Schedule

__all__ = ["DUAL_PIPE_V"]


def _orders(places: int, chunks: int, micro_batches: int) -> Orders:
    return tuple(_place(place, places, chunks * places - 1 - place, micro_batches) for place in range(places))


def _place(down: int, places: int, up: int, micro_batches: int) -> tuple[Action, ...]:
    """``down``: the stage of the first half, which is also the number of the place; ``up``: that of the second half."""
    row = Row(micro_batches)
    behind = places - 1 - down
    for _ in range(2 * behind):
        row.forward(down)
    for _ in range(down + 1):
        row.forward(down)
        row.forward(up)
    for _ in range(behind):
        row.input(up)
        row.weight()
        row.forward(up)
    for _ in range(max(micro_batches, 2 * places) - 2 * places + down + 1):
        row.forward(down)
        row.backward(up)
        row.forward(up)
        row.backward(down)
    for _ in range(behind):
        row.backward(up)
        row.forward(up)
        row.backward(down)
    _end(row, down, up, behind)
    return row.actions


def _end(row: Row, down: int, up: int, behind: int) -> None:
    """No forward is left: of the last backwards the second half are split, so that gradients leave early."""
    passes = [stage for _ in range(down + 1) for stage in (up, down)]
    for number, stage in enumerate(passes):
        if number <= down:
            row.backward(stage)
        else:
            row.input(stage)
    for _ in range(behind):
        row.weight()
        row.input(down)
    row.weights()


DUAL_PIPE_V = Schedule(name="DualPipeV", placement="v", chunks=2, make=_orders, halves=True)

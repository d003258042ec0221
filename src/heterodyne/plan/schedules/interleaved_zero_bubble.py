"""Interleaved zero bubble: ZB-H1 with v stages on each place (Qi et al., ICLR 2024, as PyTorch has it).

Backwards come in halves, so gradients reach the places before half as late, and the warm-up is shorter: (v-1) g + p-1-r. Place r
owes the weight gradients of its last r micro-batches, and pays them at the end, where 1F1B would wait.
"""

from __future__ import annotations

from heterodyne.plan.program import Action
from heterodyne.plan.schedules.interleaved import round_order, round_size
from heterodyne.plan.schedules.schedule import Orders, Schedule, action

__all__ = ["INTERLEAVED_ZERO_BUBBLE"]


def _orders(places: int, chunks: int, micro_batches: int) -> Orders:
    return tuple(_place(place, places, chunks, micro_batches) for place in range(places))


def _place(place: int, places: int, chunks: int, micro_batches: int) -> tuple[Action, ...]:
    size = round_size(places, micro_batches)
    stages = range(place, places * chunks, places)
    forwards = round_order(stages, places, micro_batches)
    backwards = round_order(stages[::-1], places, micro_batches)
    warm_up = (chunks - 1) * size + places - 1 - place
    row = [("F", *own) for own in forwards[:warm_up]]
    for number, own in enumerate(backwards):
        if warm_up + number < len(forwards):
            row.append(("F", *forwards[warm_up + number]))
        row.append(("I", *own))
        if number >= place:
            row.append(("W", *backwards[number - place]))
    row += [("W", *own) for own in backwards[max(0, len(backwards) - place) :]]
    return tuple(action(stage, kind, index) for kind, stage, index in row if index < micro_batches)


INTERLEAVED_ZERO_BUBBLE = Schedule(
    name="InterleavedZeroBubble", placement="loop", chunks=None, make=_orders, halves=True
)

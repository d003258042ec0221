"""Interleaved zero bubble: ZB-H1 with v stages on each place (Qi et al., ICLR 2024, as PyTorch has it).

Backwards come in halves, so gradients reach the places before half as late, and the warm-up is shorter: (v-1) g + p-1-r. Place r
owes the weight gradients of its last r micro-batches, and pays them at the end, where 1F1B would wait.
"""

from __future__ import annotations

from heterodyne.plan.program import Action
from heterodyne.plan.schedules.interleaved import round_order, round_size
from heterodyne.plan.schedules.schedule import Orders, Schedule

__all__ = ["INTERLEAVED_ZERO_BUBBLE"]


def _orders(places: int, chunks: int, micro_batches: int) -> Orders:
    return tuple(_place(place, places, chunks, micro_batches) for place in range(places))


def _place(place: int, places: int, chunks: int, micro_batches: int) -> tuple[Action, ...]:
    size = round_size(places, micro_batches)
    stages = range(place, places * chunks, places)
    forwards = round_order(stages, places, micro_batches)
    backwards = round_order(stages[::-1], places, micro_batches)
    warm_up = (chunks - 1) * size + places - 1 - place
    row = [Action(stage, "F", index) for stage, index in forwards[:warm_up]]
    for number, (stage, index) in enumerate(backwards):
        if warm_up + number < len(forwards):
            later, other = forwards[warm_up + number]
            row.append(Action(later, "F", other))
        row.append(Action(stage, "I", index))
        if number >= place:
            row.append(Action(backwards[number - place][0], "W", backwards[number - place][1]))
    row += [Action(stage, "W", index) for stage, index in backwards[max(0, len(backwards) - place) :]]
    return tuple(action for action in row if action.index is not None and action.index < micro_batches)


INTERLEAVED_ZERO_BUBBLE = Schedule(
    name="InterleavedZeroBubble", placement="loop", chunks=None, make=_orders, halves=True
)

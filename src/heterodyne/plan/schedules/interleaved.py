"""Interleaved 1F1B (Narayanan et al., SC 2021): v stages on each place, so that the bubble is about 1/v of that of 1F1B.

The micro-batches go through in rounds of g: a place runs a round through its first stage, then through its second, and so on.
Place r begins with (v-1) g + 2 (p-1-r) forwards, then runs one forward and one backward in turn. Any number of micro-batches is
split into rounds of equal size, as near to p as can be; the last round may lack some.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, zip_longest

from heterodyne.plan.program import Action
from heterodyne.plan.schedules.schedule import Orders, Schedule, action

__all__ = ["INTERLEAVED_1F1B", "round_count", "round_order", "round_size"]


def round_count(places: int, micro_batches: int) -> int:
    return max(1, micro_batches // places)


def round_size(places: int, micro_batches: int) -> int:
    """Micro-batches of a round (the last one has perhaps fewer)."""
    return -(-micro_batches // round_count(places, micro_batches))


def round_order(stages: Sequence[int], places: int, micro_batches: int) -> list[tuple[int, int]]:
    """(stage, micro-batch) in the order in which a place runs them; the last round filled up with micro-batches that are not there."""
    size = round_size(places, micro_batches)
    return [
        (stage, first + index) for first in range(0, micro_batches, size) for stage in stages for index in range(size)
    ]


def _orders(places: int, chunks: int, micro_batches: int) -> Orders:
    size = round_size(places, micro_batches)
    return tuple(
        _place(place, places, chunks, (chunks - 1) * size + 2 * (places - 1 - place), micro_batches)
        for place in range(places)
    )


def _place(place: int, places: int, chunks: int, warm_up: int, micro_batches: int) -> tuple[Action, ...]:
    stages = range(place, places * chunks, places)
    forwards = [("F", *own) for own in round_order(stages, places, micro_batches)]
    backwards = [("B", *own) for own in round_order(stages[::-1], places, micro_batches)]
    in_turn = chain.from_iterable(zip_longest(forwards[warm_up:], backwards))
    row = (*forwards[:warm_up], *(entry for entry in in_turn if entry is not None))
    return tuple(action(stage, kind, index) for kind, stage, index in row if index < micro_batches)


INTERLEAVED_1F1B = Schedule(name="Interleaved1F1B", placement="loop", chunks=None, make=_orders)

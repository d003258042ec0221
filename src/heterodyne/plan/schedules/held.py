"""How many bytes of activations each place holds at most. The order on a place settles that, whatever the times are."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from heterodyne.plan.program import Action
from heterodyne.plan.schedules.schedule import Orders
from heterodyne.plan.schedules.times import StageBytes

__all__ = ["held_along", "peak_bytes"]


def peak_bytes(orders: Orders, held: Sequence[StageBytes]) -> tuple[int, ...]:
    """The most bytes that each place holds at any time; ``held``: by stage."""
    return tuple(max((during for during in held_along(row, held)), default=0) for row in orders)


def held_along(row: Sequence[Action], held: Sequence[StageBytes]) -> list[int]:
    """What a place holds while it does each of its actions."""
    again = {(action.stage, action.index) for action in row if action.kind == "R"}
    taken, freed = [], []
    for action in row:
        stage = held[action.stage]
        inside = stage.again if action.kind in ("I", "B") and (action.stage, action.index) not in again else 0
        first = stage.activation - stage.again
        taken.append({"F": first, "R": stage.again}.get(action.kind, inside))
        freed.append(
            {"B": stage.activation, "I": stage.input_frees, "W": stage.activation - stage.input_frees}.get(
                action.kind, 0
            )
        )
    before = [0, *accumulate(more - less for more, less in zip(taken, freed, strict=True))]
    return [sum(pair) for pair in zip(before, taken, strict=False)]

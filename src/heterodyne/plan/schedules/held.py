"""How many bytes of activations each place holds at most. The order on a place settles that, whatever the times are."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from heterodyne.plan.program import Action
from heterodyne.plan.schedules.schedule import Orders
from heterodyne.plan.schedules.times import StageBytes

__all__ = ["held_along", "peak_bytes", "running_bytes", "taken_and_freed"]


def peak_bytes(orders: Orders, held: Sequence[StageBytes]) -> tuple[int, ...]:
    """The most bytes that each place holds at any time; ``held``: by stage."""
    return tuple(max(held_along(row, held), default=0) for row in orders)


def held_along(row: Sequence[Action], held: Sequence[StageBytes]) -> list[int]:
    """Return what a place holds while it does each of its actions."""
    ready = {(action.stage, action.index) for action in row if action.kind == "R"}
    pairs = [taken_and_freed(a.kind, held[a.stage], again=(a.stage, a.index) not in ready) for a in row]
    return running_bytes([taken for taken, _ in pairs], [freed for _, freed in pairs])


def taken_and_freed(kind: str, stage: StageBytes, *, again: bool) -> tuple[int, int]:
    """Bytes that an action takes when it starts and frees when it ends; ``again``: a backward recomputes inside."""
    inside = stage.again if again else 0
    match kind:
        case "F":
            return stage.activation - stage.again, 0
        case "R":
            return stage.again, 0
        case "I":
            return inside, stage.input_frees
        case "B":
            return inside, stage.activation
        case _:  # W
            return 0, stage.activation - stage.input_frees


def running_bytes(taken: Sequence[int], freed: Sequence[int]) -> list[int]:
    """Return what is held during each of a list of actions that take at their start and free at their end."""
    before = accumulate((more - less for more, less in zip(taken, freed, strict=True)), initial=0)
    return [held + more for held, more in zip(before, taken, strict=False)]

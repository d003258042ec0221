"""Who waits for whom, read off the orders of a schedule: the same for all pipelines of one shape, whatever their times are.

It is read once for a shape, so that a search that plays many pipelines does not make the same orders again and again.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from heterodyne.plan.schedules import SCHEDULES

__all__ = ["WORKS", "Steps", "steps_of"]

WORKS = ("F", "B", "I", "W", "R", "B after R", "I after R")
"""Kinds of work of a stage, with the backwards that find recomputed what they need."""
_KIND = {name: number for number, name in enumerate(WORKS)}


@dataclass(frozen=True, kw_only=True, slots=True)
class Steps:
    """The actions of all places in an order in which each can run.

    Args:
        rows: of each action its place, its work (``len(WORKS)`` x stage + the number in `WORKS`), the number of the action on
            another place that it waits for (-1: none), and the stage whose message brings that.
        series: by work, the numbers of its actions for one micro-batch after the other.
    """

    rows: tuple[tuple[int, int, int, int], ...]
    series: tuple[tuple[int, ...], ...]


@lru_cache(maxsize=128)
def steps_of(schedule: str, places: int, chunks: int, micro_batches: int) -> Steps:
    """Return the steps of the orders of a named schedule for so many places, stages on each, and micro-batches."""
    stages = places * chunks
    home = SCHEDULES[schedule].stage_places(places, chunks)
    left = [iter(row) for row in SCHEDULES[schedule].orders(places, chunks, micro_batches)]
    ready = [next(row, None) for row in left]
    rows: list[tuple[int, int, int, int]] = []
    forward: dict[tuple[int, int | None], int] = {}
    backward: dict[tuple[int, int | None], int] = {}
    series: list[list[int]] = [[] for _ in range(len(WORKS) * stages)]
    again: set[tuple[int, int | None]] = set()
    moved = True
    while moved:
        moved = False
        for place in range(places):
            while (action := ready[place]) is not None:
                stage, kind, source, link = action.stage, action.kind, -1, 0
                if kind == "F" and stage and home[stage - 1] != place:
                    source, link = forward.get((stage - 1, action.index), -2), stage - 1
                elif kind in ("B", "I") and stage < stages - 1 and home[stage + 1] != place:
                    source, link = backward.get((stage + 1, action.index), -2), stage
                if source == -2:
                    break
                if kind == "F":
                    forward[stage, action.index] = len(rows)
                elif kind in ("B", "I"):
                    backward[stage, action.index] = len(rows)
                elif kind == "R":
                    again.add((stage, action.index))
                after = kind in ("B", "I") and (stage, action.index) in again
                work = len(WORKS) * stage + _KIND[f"{kind} after R" if after else kind]
                series[work].append(len(rows))
                rows.append((place, work, source, link))
                ready[place] = next(left[place], None)
                moved = True
    return Steps(rows=tuple(rows), series=tuple(map(tuple, series)))

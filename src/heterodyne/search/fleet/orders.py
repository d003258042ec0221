"""What the orders of a schedule say about all pipelines of one shape, whatever their times are: who waits for whom, and who holds what.

Both are read off the orders themselves (`plan.schedules`), once for a shape, so that a search that plays many pipelines does not make
the same orders again and again.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from heterodyne.plan.schedules import SCHEDULES
from heterodyne.plan.schedules.interleaved import rounds
from heterodyne.search.fleet.plan import ScheduleName

__all__ = ["Steps", "alike", "held_at_most", "round_size", "steps_of"]

_KINDS = {"F": 0, "B": 1, "I": 2, "W": 3}
_ROUNDS = 4
Vector = tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Steps:
    """The actions of all places in an order in which each can run.

    Args:
        rows: of each action its place, its work (4 x stage + 0 for F, 1 for B, 2 for I, 3 for W), the number of the action on another
            place that it waits for (-1: none), and the stage whose message brings that.
        series: by work, the numbers of its actions for one micro-batch after the other.
    """

    rows: tuple[tuple[int, int, int, int], ...]
    series: tuple[tuple[int, ...], ...]


@lru_cache(maxsize=128)
def steps_of(schedule: ScheduleName, places: int, chunks: int, micro_batches: int) -> Steps:
    """Of the orders of a schedule for so many places, stages on each, and micro-batches."""
    stages = places * chunks
    left = [iter(row) for row in SCHEDULES[schedule].orders(places, chunks, micro_batches)]
    ready = [next(row, None) for row in left]
    rows: list[tuple[int, int, int, int]] = []
    forward: dict[tuple[int, int | None], int] = {}
    backward: dict[tuple[int, int | None], int] = {}
    series: list[list[int]] = [[] for _ in range(4 * stages)]
    moved = True
    while moved:
        moved = False
        for place in range(places):
            while (action := ready[place]) is not None:
                stage, kind, source, link = action.stage, action.kind, -1, 0
                if kind == "F" and stage:
                    source, link = forward.get((stage - 1, action.index), -2), stage - 1
                elif kind in ("B", "I") and stage < stages - 1:
                    source, link = backward.get((stage + 1, action.index), -2), stage
                if source == -2:
                    break
                if kind == "F":
                    forward[stage, action.index] = len(rows)
                elif kind != "W":
                    backward[stage, action.index] = len(rows)
                work = 4 * stage + _KINDS[kind]
                series[work].append(len(rows))
                rows.append((place, work, source, link))
                ready[place] = next(left[place], None)
                moved = True
    return Steps(rows=tuple(rows), series=tuple(map(tuple, series)))


def round_size(places: int, chunks: int, micro_batches: int) -> int:
    """Micro-batches after which the orders of a schedule begin again: those of a round, where a place has several stages."""
    return 1 if chunks == 1 else rounds(places, micro_batches)[1]


def alike(schedule: ScheduleName, places: int, chunks: int, micro_batches: int) -> int:
    """No more micro-batches, for which each place holds at most as many.

    Under GPipe all are held. Under the others the forwards are at most ``2 places`` ahead of the second halves of the backwards where a
    place has one stage, and less than three rounds where it has several; from there on what is held comes again with every round.
    """
    most = _ROUNDS * places
    if schedule == "GPipe" or micro_batches <= most:
        return micro_batches
    longer = round_size(places, chunks, micro_batches) - places
    # So many in a few rounds make rounds of the same size.
    return most if chunks == 1 or longer == 0 else most + _ROUNDS * (longer - 1) + 1


def held_at_most(
    schedule: ScheduleName, places: int, chunks: int, micro_batches: int
) -> tuple[tuple[Vector, ...], ...]:
    """Micro-batches that a place holds of each of its stages at the same time, from F to the end of B or W.

    For each place the vectors that no other one exceeds in every stage. Shape [places, vectors, chunks]. Place i of p holds p - i under
    1F1B, p under ZB-H1, 2 p under ZB-H2 (what stands in `plan.schedules`; there the weight gradients of later places wait longer), and
    all under GPipe, if there are so many; interleaved orders are counted.
    """
    if schedule == "GPipe":
        return (((micro_batches,),),) * places
    return _counted(schedule, places, chunks, alike(schedule, places, chunks, micro_batches))


@lru_cache(maxsize=4096)
def _counted(schedule: ScheduleName, places: int, chunks: int, micro_batches: int) -> tuple[tuple[Vector, ...], ...]:
    if chunks == 1 and schedule in ("1F1B", "ZBH1", "ZBH2"):
        most = {"1F1B": range(places, 0, -1), "ZBH1": [places] * places, "ZBH2": [2 * places] * places}[schedule]
        return tuple(((min(micro_batches, own if places > 1 else 1),),) for own in most)
    found = []
    for row in SCHEDULES[schedule].orders(places, chunks, micro_batches):
        held = [0] * chunks
        peaks: dict[Vector, None] = {}
        rising = False
        for action in row:
            chunk = action.stage // places
            if action.kind == "F":
                held[chunk] += 1
                rising = True
            elif action.kind in ("B", "W"):
                if rising:
                    peaks[tuple(held)] = None
                held[chunk] -= 1
                rising = False
        found.append(_largest(peaks))
    return tuple(found)


def _largest(vectors: Iterable[Vector]) -> tuple[Vector, ...]:
    kept: list[Vector] = []
    for vector in sorted(vectors, key=sum, reverse=True):
        if not any(_within(vector, other) for other in kept):
            kept.append(vector)
    return tuple(kept)


def _within(vector: Sequence[int], other: Sequence[int]) -> bool:
    return all(a <= b for a, b in zip(vector, other, strict=True))

"""How many micro-batches each place of a schedule holds at most, read off its orders: the same for all pipelines of one shape.

It is counted once for a shape, so that a search that weighs many pipelines does not make the same orders again and again.
"""

from __future__ import annotations

from collections.abc import Collection
from functools import lru_cache

import numpy as np

from heterodyne.plan.schedules import SCHEDULES
from heterodyne.plan.schedules.interleaved import round_size

__all__ = ["alike", "held_at_most"]

_ROUNDS = 4
Vector = tuple[int, ...]


def alike(schedule: str, places: int, chunks: int, micro_batches: int) -> int:
    """No more micro-batches, for which each place holds at most as many.

    Under GPipe all are held. Under the others the forwards are at most ``2 places`` ahead of the second halves of the backwards where a
    place has one stage, and less than three rounds where it has several; from there on what is held comes again with every round.
    """
    most = _ROUNDS * places
    if schedule == "GPipe" or micro_batches <= most:
        return micro_batches
    longer = 0 if chunks == 1 else round_size(places, micro_batches) - places
    # So many in a few rounds make rounds of the same size.
    return most if longer == 0 else most + _ROUNDS * (longer - 1) + 1


def held_at_most(schedule: str, places: int, chunks: int, micro_batches: int) -> tuple[tuple[Vector, ...], ...]:
    """Micro-batches that a place holds of each of its stages at the same time, from F to the end of B or W.

    For each place the vectors that no other one exceeds in every stage. Shape [places, vectors, chunks]. Place i of p holds p - i under
    1F1B, p under ZB-H1, 2 p under ZB-H2 (what stands in `plan.schedules`; there the weight gradients of later places wait longer), and
    all under GPipe, if there are so many; interleaved orders are counted.
    """
    if schedule == "GPipe":
        return (((micro_batches,) * chunks,),) * places
    return _counted(schedule, places, chunks, alike(schedule, places, chunks, micro_batches))


@lru_cache(maxsize=4096)
def _counted(schedule: str, places: int, chunks: int, micro_batches: int) -> tuple[tuple[Vector, ...], ...]:
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


def _largest(vectors: Collection[Vector]) -> tuple[Vector, ...]:
    """Those of unlike vectors that no other one exceeds in every number, the largest sum first."""
    ordered = sorted(vectors, key=sum, reverse=True)
    own = np.array(ordered)
    within = (own[:, None, :] <= own[None, :, :]).all(axis=2)
    return tuple(vector for vector, others in zip(ordered, within.sum(axis=1).tolist(), strict=True) if others == 1)

"""Which plans are rehearsed, and for how long: those that may be the fastest, by prediction and then by the clock."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from heterodyne.search.planned import Candidate, Planned, identity, serves

__all__ = ["NEAR", "near_the_chosen", "still_in"]

NEAR = 1.25
"""How much longer than the chosen plan's a step may be predicted, for the plan to be worth a rehearsal."""
_CLEAR_ROUNDS = 5
"""A plan that was slower than the best one in all of the last so many is not run any more: by chance one in 32 is."""


def near_the_chosen(planned: Planned, most: int) -> tuple[Candidate, ...]:
    """The chosen one and those that may be as fast, best first: what a rehearsal can tell apart. None where one way was asked for."""
    if planned.strategy in ("equal", "fastest") or planned.chosen.kind in ("marked", "given"):
        return ()
    near: dict[str, Candidate] = {identity(planned.plan): planned.chosen}
    for candidate in sorted(planned.candidates, key=lambda c: c.weighed_s):
        close = serves(candidate.kind, planned.strategy) and candidate.weighed_s <= NEAR * planned.chosen.weighed_s
        if candidate.plan is not None and close:
            near.setdefault(identity(candidate.plan), candidate)
    return tuple(near.values())[:most] if len(near) > 1 else ()


def still_in(taken: Sequence[Sequence[float]]) -> list[int]:
    """The plans that may still be the fastest, by their places.

    ``taken``: seconds of each, round after round; those that were out before have fewer.
    """
    rounds = max(map(len, taken))
    there = [place for place, own in enumerate(taken) if len(own) == rounds]
    if rounds < _CLEAR_ROUNDS:
        return there
    best = taken[min(there, key=lambda place: median(taken[place]))][-_CLEAR_ROUNDS:]
    return [
        place
        for place in there
        if not all(own > least for own, least in zip(taken[place][-_CLEAR_ROUNDS:], best, strict=True))
    ]

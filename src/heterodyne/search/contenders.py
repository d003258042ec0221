"""Rehearsals: which plans are run, for how long, and what that shows.

Plans take turns of a few steps. Whatever slows the machine slows all plans of that time, so two plans are compared turn by turn: the
median of the ratios, and its standard error from their quartiles (McGill, Tukey and Larsen, "Variations of box plots", 1978).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt
from statistics import median, quantiles

from heterodyne.search.planned import Candidate, Planned, Rehearsed, identity, serves

__all__ = ["LEAST_TURNS", "NEAR", "near_the_chosen", "nothing_new", "still_in", "told_apart"]

NEAR = 1.25
"""How much longer than the chosen plan's a step may be predicted, for the plan to be worth a rehearsal."""
LEAST_TURNS = 4
"""Fewer have no quartiles to speak of."""
_ERRORS = 2
"""Standard errors beyond which a plan is not run any more."""


def near_the_chosen(planned: Planned, most: int) -> tuple[Candidate, ...]:
    """The chosen plan and those that may be as fast, best first. None where one way was asked for."""
    if planned.strategy in ("equal", "fastest") or planned.chosen.kind in ("marked", "given"):
        return ()
    near: dict[str, Candidate] = {identity(planned.plan): planned.chosen}
    for candidate in sorted(planned.candidates, key=lambda c: c.weighed_s):
        close = serves(candidate.kind, planned.strategy) and candidate.weighed_s <= NEAR * planned.chosen.weighed_s
        if candidate.plan is not None and close:
            near.setdefault(identity(candidate.plan), candidate)
    return tuple(near.values())[:most] if len(near) > 1 else ()


def nothing_new(planned: Planned) -> bool:
    """Whether the choice was rehearsed among all that may be faster. Free memory changes, so another plan may fit by now."""
    return planned.chosen.rehearsed is not None and not any(
        c.plan is not None
        and c.rehearsed is None
        and serves(c.kind, planned.strategy)
        and c.weighed_s < planned.chosen.weighed_s
        for c in planned.candidates
    )


def still_in(taken: Sequence[Sequence[float]]) -> list[int]:
    """Indices of the plans that may still be the fastest: all but those that are clearly slower than the fastest so far.

    ``taken``: seconds per step of each, turn by turn; plans that were dropped have fewer.
    """
    turns = max(map(len, taken))
    there = [place for place, own in enumerate(taken) if len(own) == turns]
    if turns < LEAST_TURNS:
        return there
    best = taken[_fastest(taken, there)]
    return [place for place in there if not _Slower.of(taken[place], best).by(_ERRORS)]


def told_apart(taken: Sequence[Sequence[float]]) -> list[Rehearsed]:
    """The rehearsed time of each plan; a plan that was dropped is slower than the fastest."""
    turns = max(map(len, taken))
    there = [place for place, own in enumerate(taken) if len(own) == turns]
    best = taken[_fastest(taken, there)]
    return [
        Rehearsed(seconds=median(own), as_fast=place in there and not _Slower.of(own, best).by(1))
        for place, own in enumerate(taken)
    ]


def _fastest(taken: Sequence[Sequence[float]], there: Sequence[int]) -> int:
    return min(there, key=lambda place: median(taken[place]))


@dataclass(frozen=True)
class _Slower:
    """The relative difference of one plan's step to another's, and its standard error."""

    part: float
    error: float

    @classmethod
    def of(cls, own: Sequence[float], other: Sequence[float]) -> _Slower:
        more = [mine / its - 1 for mine, its in zip(own, other, strict=True)]
        low, _, high = quantiles(more, n=4, method="inclusive") if len(more) > 1 else (0.0, 0.0, 0.0)
        return cls(median(more), (high - low) / sqrt(len(more)))

    def by(self, errors: float) -> bool:
        return self.part > errors * self.error

"""The choice among the candidates."""

from __future__ import annotations

from collections.abc import Sequence

from heterodyne.cost.recipe import Recipe
from heterodyne.errors import InfeasibleError
from heterodyne.plan.precision import in_words
from heterodyne.search.fit import Fit, nothing_fits
from heterodyne.search.planned import Candidate, Strategy, serves

__all__ = ["chosen_of"]


def chosen_of(candidates: Sequence[Candidate], strategy: Strategy, fits: Sequence[Fit], recipe: Recipe) -> Candidate:
    """The fastest candidate that serves the strategy, by doubted prediction; ties go to fewer idle devices, then to the first. Where some
    were rehearsed, the first of those that the rehearsal cannot tell from the fastest.

    Raises InfeasibleError.
    """
    only = len({c.kind for c in candidates} & {"balanced", "equal", "fewer", "fastest"}) == 1
    serving = [c for c in candidates if serves(c.kind, strategy, only=only)]
    possible = [c for c in serving if c.step_s is not None]
    # What the author of the model has marked is what was asked for, also where something else were faster.
    possible = [c for c in possible if c.kind == "marked"] or possible
    if any(c.kind == "marked" for c in serving) and not any(c.kind == "marked" for c in possible):
        why = "; ".join(f"{c.name}: {c.why_not}" for c in serving if c.kind == "marked")
        raise InfeasibleError(f"the model cannot run as it is marked: {why}")
    possible = [c for c in possible if c.rehearsed is not None] or possible
    possible = [c for c in possible if c.rehearsed is not None and c.rehearsed.as_fast] or possible
    if possible:
        return min(possible, key=lambda c: (c.weighed_s, len(c.left_out)))
    if not any(fit.sizes for fit in fits):
        why = next((c.why_not for c in serving if c.kind == "pipeline"), "")
        hosts = "; ".join(c.why_not for c in serving if c.short_of_host)
        raise nothing_fits(fits, recipe.optimizer, in_words(recipe.precision), pipeline=why, hosts=hosts)
    raise InfeasibleError(
        f"no plan with strategy {strategy!r}: "
        + ("; ".join(f"{c.name}: {c.why_not}" for c in serving) or "pipelines need two devices and two ops at least")
    )

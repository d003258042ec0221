"""The pool of candidates, and the questions to it: the best under an objective and a mask, the runners-up, the frontier."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from math import inf

from heterodyne.search.fleet.objective import Objective
from heterodyne.search.fleet.plan import Candidate, Mix, TemplatePlan
from heterodyne.search.fleet.space import Space

__all__ = ["CandidatePool"]

_RUNNERS_UP = 5


@dataclass(kw_only=True)
class CandidatePool:
    """The candidates of a search. It is asked when the search is over: answers are kept.

    Args:
        objective: that ranks the candidates.
        accepts: of the candidates only accepted ones count; all of them if none is.
        evaluated: the fastest candidate of each mix. ``others``: more candidates, which win ties.
        bound_s: lower bound on the step time of the space, whatever the cost.
        stopped: the search was ended early.
    """

    objective: Objective = field(default_factory=Objective)
    accepts: Callable[[TemplatePlan], bool] | None = None
    evaluated: dict[Mix, Candidate] = field(default_factory=dict)
    others: tuple[Candidate, ...] = ()
    bound_s: float = inf
    stopped: bool = False

    def add(self, mix: Mix, candidate: Candidate) -> bool:
        """Keep a candidate if it is the fastest of its mix, and return whether it is."""
        known = self.evaluated.get(mix)
        if known is not None and known.predicted.step_s <= candidate.predicted.step_s:
            return False
        self.evaluated[mix] = candidate
        return True

    @property
    def best(self) -> Candidate:
        """The best accepted candidate; there has to be one (see `ranked`)."""
        return self._accepted[0]

    @property
    def refused(self) -> Candidate | None:
        """A better candidate that was not accepted."""
        return None if self.best is self.ranked[0] else self.ranked[0]

    @property
    def runners_up(self) -> tuple[Candidate, ...]:
        """The next best accepted candidates with other pipelines, best first."""
        unlike: dict[object, Candidate] = {}
        for candidate in self._accepted:
            # In whatever order their places follow each other.
            pipelines: Counter[object] = Counter()
            for group in candidate.plan.groups:
                pipelines[tuple(sorted((home.pool, home.widths) for home in group.template.homes))] += group.replicas
            unlike.setdefault(frozenset(pipelines.items()), candidate)
        return tuple(unlike.values())[1 : _RUNNERS_UP + 1]

    @cached_property
    def ranked(self) -> list[Candidate]:
        """All candidates that keep the objective's budget, the best first; of equals the ones with fewer devices."""
        score = self.objective.score
        allowed = (candidate for candidate in self._every if score(candidate) < inf)
        return sorted(allowed, key=lambda candidate: (score(candidate), candidate.predicted.devices))

    def best_of(self, space: Space) -> Candidate | None:
        """Return the best candidate of a space, accepted or not; None if there is none."""
        return next((candidate for candidate in self.ranked if space.holds(candidate.plan)), None)

    @cached_property
    def frontier(self) -> tuple[Candidate, ...]:
        """The Pareto frontier over seconds, usd and devices, the fastest first."""
        kept: list[Candidate] = []

        def figures(candidate: Candidate) -> tuple[float, float, float]:
            own = candidate.predicted
            return own.step_s, 0.0 if own.usd is None else own.usd, own.devices

        for candidate in sorted(self._every, key=figures):
            own = figures(candidate)
            if not any(all(a <= b for a, b in zip(figures(other), own, strict=True)) for other in kept):
                kept.append(candidate)
        return tuple(kept)

    @property
    def _every(self) -> tuple[Candidate, ...]:
        return (*self.others, *self.evaluated.values())

    @cached_property
    def _accepted(self) -> list[Candidate]:
        accepts = self.accepts
        return self.ranked if accepts is None else [own for own in self.ranked if accepts(own.plan)] or self.ranked

"""The planner for fleets: the best plan for an objective, the alternatives, and the trade-off of time, money and devices.

Less money or energy means fewer or cheaper devices, so the fastest plan is searched under falling budgets and the best of all evaluated
plans is improved for the objective. Less memory is searched under falling memory limits.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from math import inf

from heterodyne.cluster.fleet import Fleet
from heterodyne.cost.layers import LayerCosts
from heterodyne.errors import ClusterError, InfeasibleError
from heterodyne.predictor.software import Software
from heterodyne.search.fleet.evaluated_plan import EvaluatedPlan
from heterodyne.search.fleet.network import Network
from heterodyne.search.fleet.objective import Objective
from heterodyne.search.fleet.plan import TemplatePlan
from heterodyne.search.fleet.predict import Predictor
from heterodyne.search.fleet.ring_network import RingNetwork
from heterodyne.search.fleet.search import Search
from heterodyne.search.fleet.space import Space
from heterodyne.search.fleet.tables import Tables
from heterodyne.search.fleet.watch import StoppedError, Watch
from heterodyne.search.fleet.why_not import why_not

__all__ = ["FleetPlanner", "Planned", "frontier_of"]

_BUDGETS = 8
_RUNNERS_UP = 5
_MEMORIES = 5


@dataclass(frozen=True, kw_only=True)
class Planned:
    """The result of a search.

    Args:
        best: by the objective.
        runners_up: the next best plans with other pipelines, best first.
        bound_s: lower bound on the step time of the space, whatever the cost.
        frontier: the Pareto frontier over seconds, usd and devices, the fastest first.
        stopped: the search was ended early.
        refused: a better plan that was not accepted (see `FleetPlanner.plan`).
    """

    objective: Objective
    best: EvaluatedPlan
    runners_up: tuple[EvaluatedPlan, ...]
    bound_s: float
    frontier: tuple[EvaluatedPlan, ...]
    stopped: bool
    refused: EvaluatedPlan | None = None


@dataclass(frozen=True, kw_only=True)
class FleetPlanner:
    """Plans one model on one fleet.

    Args:
        network: the model of traffic between devices; by default rings over the wires of the fleet.
        software: that runs the plan.
    """

    fleet: Fleet
    costs: LayerCosts
    global_batch: int
    network: Network | None = None
    software: Software = field(default_factory=Software)
    _tables: list[Tables] = field(default_factory=list, repr=False)

    @property
    def tables(self) -> Tables:
        if not self._tables:
            self._tables.append(Tables(self.costs))
        return self._tables[0]

    def search(self, space: Space, *, watch: Watch | None = None, memory: float = 1.0) -> Search:
        """``memory``: the fraction of each device's memory that may be used."""
        fleet = self.fleet
        if memory < 1:
            pools = (replace(pool, memory_bytes=max(1, int(pool.memory_bytes * memory))) for pool in fleet.pools)
            fleet = replace(fleet, pools=tuple(pools))
        predictor = Predictor(
            fleet=fleet,
            tables=self.tables,
            network=self.network or RingNetwork(self.fleet, self.software),
            global_batch=self.global_batch,
            software=self.software,
        )
        return Search(predictor=predictor, space=space, watch=watch or Watch())

    def plan(
        self,
        objective: Objective | None = None,
        *,
        space: Space | None = None,
        watch: Watch | None = None,
        frontier: bool = False,
        accepts: Callable[[TemplatePlan], bool] | None = None,
    ) -> Planned:
        """The best plan. ``watch`` may stop the search with the best so far; otherwise the same input gives the same plan.

        Of the evaluated plans only accepted ones count; all of them if none is.

        Raises InfeasibleError if nothing fits, with the reason; ClusterError if a price or watts that the objective needs are missing.
        """
        objective, space = objective or Objective(), space or Space()
        missing = objective.missing(self.fleet)
        if missing:
            what = "watts" if objective.goal == "energy" else "a price"
            raise ClusterError(f"{objective.goal} needs {what} of every pool; not stated for {', '.join(missing)}")
        search = self.search(space, watch=watch)
        rates = objective.rates(self.fleet)
        limit = inf if objective.usd_per_hour is None else objective.usd_per_hour
        if objective.goal == "memory":
            found = self._small(objective, space, search)
        elif objective.goal == "throughput":
            found = [search.run(objective.score, prices=rates, budget=limit)]
        else:
            found = self._cheap(objective, search, limit)
        if frontier and objective.goal == "throughput":
            priced = Objective(goal="money")
            if not priced.missing(self.fleet):
                self._cheap(priced, search, limit)
        known = [weighed for weighed in (*found, *search.evaluated.values()) if weighed is not None]
        ranked = sorted(
            (w for w in known if objective.score(w) < inf), key=lambda w: (objective.score(w), w.predicted.devices)
        )
        if not ranked and search.stopped:
            raise StoppedError
        if not ranked:
            raise InfeasibleError(why_not(search, objective))
        accepted = ranked if accepts is None else [w for w in ranked if accepts(w.plan)] or ranked
        return Planned(
            objective=objective,
            best=accepted[0],
            runners_up=_unlike(accepted)[1 : _RUNNERS_UP + 1],
            bound_s=search.bound_s,
            frontier=frontier_of(known),
            stopped=search.stopped,
            refused=None if accepted[0] is ranked[0] else ranked[0],
        )

    def _cheap(self, objective: Objective, search: Search, limit: float) -> list[EvaluatedPlan | None]:
        """The best plans under budgets from all devices down to the cheapest one, and for the objective itself.

        Under a budget the score is time; the best by the objective is chosen among all evaluated plans.
        """
        rates = objective.rates(self.fleet)
        assert rates is not None  # money and energy have rates
        whole = sum(rate * pool.devices for rate, pool in zip(rates.tolist(), self.fleet.pools, strict=True))
        if whole <= 0:
            return [search.run(objective.score, by_time=False)]
        least = min(rate for rate in rates.tolist() if rate > 0)
        whole = min(whole, limit if objective.goal == "money" else whole)
        found: list[EvaluatedPlan | None] = []
        for number in range(_BUDGETS):
            budget = whole * (least / whole) ** (number / (_BUDGETS - 1)) if whole > least else whole
            found.append(search.run(objective.score, prices=rates, budget=budget, by_time=False))
        return found

    def _small(self, objective: Objective, space: Space, search: Search) -> list[EvaluatedPlan | None]:
        """The best plans under memory limits, bisected between what fits and what does not."""
        found = [search.run(objective.score, by_time=False)]
        low, high = 0.0, 1.0 if found[0] is None else found[0].predicted.peak_share
        for _ in range(_MEMORIES):
            middle = (low + high) / 2
            smaller = self.search(space, watch=search.watch, memory=middle)
            best = smaller.run(objective.score, by_time=False)
            search.ledger.stopped = search.stopped or smaller.stopped
            if best is None:
                low = middle
            else:
                share = best.predicted.peak_share * middle  # of the devices as they are
                found.append(replace(best, predicted=replace(best.predicted, peak_share=share)))
                high = min(middle, share)
        return found


def _unlike(ranked: Iterable[EvaluatedPlan]) -> tuple[EvaluatedPlan, ...]:
    """The first of those that make the same pipelines of the same places, in whatever order these follow each other."""
    found: dict[object, EvaluatedPlan] = {}
    for weighed in ranked:
        pipelines: Counter[object] = Counter()
        for group in weighed.plan.groups:
            pipelines[tuple(sorted((home.pool, home.widths) for home in group.template.homes))] += group.replicas
        found.setdefault(frozenset(pipelines.items()), weighed)
    return tuple(found.values())


def frontier_of(known: Iterable[EvaluatedPlan]) -> tuple[EvaluatedPlan, ...]:
    """The Pareto frontier over seconds, usd and devices, the fastest first."""
    kept: list[EvaluatedPlan] = []

    def figures(weighed: EvaluatedPlan) -> tuple[float, float, float]:
        own = weighed.predicted
        return own.step_s, 0.0 if own.usd is None else own.usd, own.devices

    for weighed in sorted(known, key=figures):
        own = figures(weighed)
        if not any(all(a <= b for a, b in zip(figures(other), own, strict=True)) for other in kept):
            kept.append(weighed)
    return tuple(kept)

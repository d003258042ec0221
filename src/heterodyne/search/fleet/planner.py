"""The planner for fleets: the best plan for an objective, the alternatives, and the trade-off of time, money and devices.

Less money or energy means fewer or cheaper devices, so the fastest plan is searched under falling budgets and the best of all evaluated
plans is improved for the objective. Less memory is searched under falling memory limits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import inf

from heterodyne.cluster.fleet import Fleet
from heterodyne.cost.layers import LayerCosts
from heterodyne.errors import ClusterError, InfeasibleError
from heterodyne.predictor.software import Software
from heterodyne.search.fleet.evaluator import StoppedError, Watch
from heterodyne.search.fleet.explain import why_not
from heterodyne.search.fleet.objective import Objective
from heterodyne.search.fleet.plan import Candidate, TemplatePlan
from heterodyne.search.fleet.pool import CandidatePool
from heterodyne.search.fleet.predict import Predictor
from heterodyne.search.fleet.search import Search
from heterodyne.search.fleet.space import Space
from heterodyne.search.fleet.tables import Tables

__all__ = ["FleetPlanner"]

_BUDGETS = 8
_MEMORIES = 5


@dataclass(frozen=True, kw_only=True)
class FleetPlanner:
    """Plans one model on one fleet.

    Args:
        software: that runs the plan.
    """

    fleet: Fleet
    costs: LayerCosts
    global_batch: int
    software: Software = field(default_factory=Software)

    @cached_property
    def tables(self) -> Tables:
        return Tables(self.costs)

    def search(self, space: Space, *, watch: Watch | None = None, memory: float = 1.0) -> Search:
        """``memory``: the fraction of each device's memory that may be used."""
        fleet = self.fleet
        if memory < 1:
            pools = (replace(pool, memory_bytes=max(1, int(pool.memory_bytes * memory))) for pool in fleet.pools)
            fleet = replace(fleet, pools=tuple(pools))
        predictor = Predictor(
            fleet=fleet,
            tables=self.tables,
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
    ) -> CandidatePool:
        """Return the candidates, with the best plan. ``watch`` may stop the search with the best so far; otherwise the same input gives
        the same plan.

        Of the candidates only accepted ones count; all of them if none is.

        Raises InfeasibleError if nothing fits, with the reason; ClusterError if a price or watts that the objective needs are missing.
        """
        objective, space = objective or Objective(), space or Space()
        missing = objective.missing(self.fleet)
        if missing:
            what = "watts" if objective.goal == "energy" else "a price"
            raise ClusterError(f"{objective.goal} needs {what} of every pool; not stated for {', '.join(missing)}")
        search = self.search(space, watch=watch)
        limit = inf if objective.usd_per_hour is None else objective.usd_per_hour
        if objective.goal == "memory":
            found = self._small(objective, space, search)
        elif objective.goal == "throughput":
            found = [search.run(objective, budget=limit)]
        else:
            found = self._cheap(objective, search, limit)
        priced = Objective(goal="money")
        if frontier and objective.goal == "throughput" and not priced.missing(self.fleet):
            self._cheap(priced, search, limit)
        others = tuple(own for own in found if own is not None)
        pool = replace(search.pool, objective=objective, accepts=accepts, others=others)
        if not pool.ranked:
            raise StoppedError if pool.stopped else InfeasibleError(why_not(search, objective))
        return pool

    def _cheap(self, objective: Objective, search: Search, limit: float) -> list[Candidate | None]:
        """The best plans under budgets from all devices down to the cheapest one."""
        rates = objective.rates(self.fleet)
        assert rates is not None  # money and energy have rates
        whole = sum(rate * pool.devices for rate, pool in zip(rates.tolist(), self.fleet.pools, strict=True))
        if whole <= 0:
            return [search.run(objective)]
        least = min(rate for rate in rates.tolist() if rate > 0)
        whole = min(whole, limit if objective.goal == "money" else whole)
        steps = [number / (_BUDGETS - 1) if whole > least else 0.0 for number in range(_BUDGETS)]
        return [search.run(objective, budget=whole * (least / whole) ** step) for step in steps]

    def _small(self, objective: Objective, space: Space, search: Search) -> list[Candidate | None]:
        """The best plans under memory limits, bisected between what fits and what does not."""
        found = [search.run(objective)]
        low, high = 0.0, 1.0 if found[0] is None else found[0].predicted.peak_share
        for _ in range(_MEMORIES):
            middle = (low + high) / 2
            smaller = self.search(space, watch=search.watch, memory=middle)
            best = smaller.run(objective)
            search.pool.stopped = search.pool.stopped or smaller.pool.stopped
            if best is None:
                low = middle
            else:
                share = best.predicted.peak_share * middle  # of the devices as they are
                found.append(replace(best, predicted=replace(best.predicted, peak_share=share)))
                high = min(middle, share)
        return found

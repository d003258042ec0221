"""Families of plans: the best plan of each, or why there is none."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

from heterodyne.search.fleet.evaluated_plan import EvaluatedPlan
from heterodyne.search.fleet.objective import Objective
from heterodyne.search.fleet.plan import INTERLEAVED, TemplatePlan
from heterodyne.search.fleet.planner import FleetPlanner, Planned, frontier_of
from heterodyne.search.fleet.space import Space
from heterodyne.search.fleet.why_not import why_not

__all__ = ["Family", "Outcome", "best_of_all", "families_of", "outcomes"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """A named restriction of the search space."""

    name: str
    space: Space


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """The best plan of a family, or why there is none."""

    family: Family
    best: EvaluatedPlan | None
    why_not: str = ""


def families_of(planner: FleetPlanner, space: Space) -> tuple[Family, ...]:
    """Data parallelism only, pipelines only, without memory saving, without the slow kinds, each kind alone."""
    found = [
        Family(name="data parallel only", space=replace(space, max_stages=1, max_width=1, max_context=1, max_data=1)),
        Family(name="no stages", space=replace(space, max_stages=1)),
        Family(name="one pipeline", space=replace(space, max_pipelines=1)),
        Family(name="no tensor parallelism", space=replace(space, max_width=1)),
        *_narrower(planner, space),
        Family(name="no recompute", space=replace(space, recompute=False)),
        *_by_schedule(space),
        *(
            Family(name=f"ZeRO-{level}" if level else "no state sharding", space=replace(space, zero=(level,)))
            for level in space.zero
            if len(space.zero) > 1
        ),
    ]
    pools = planner.fleet.pools
    if len(pools) > 1:
        found.append(Family(name="no pipeline over several pools", space=replace(space, max_pools=1)))
    kinds = _by_pace(planner, space)
    if len(kinds) > 1:
        if len(kinds) > 2:
            fast = tuple(pool.name for pool in pools if pool.kind != kinds[-1])
            found.append(Family(name=f"without {kinds[-1]}, the slowest", space=replace(space, pools=fast)))
        for kind in kinds:
            own = tuple(pool.name for pool in pools if pool.kind == kind)
            found.append(Family(name=f"{kind} alone", space=replace(space, pools=own)))
    return tuple(found)


def outcomes(planner: FleetPlanner, planned: Planned, space: Space | None = None) -> Iterator[Outcome]:
    """One outcome per family: the best of all plans that any search has found and that are of the family.

    A search is limited in work and ends near its bound, so what one finds another may have passed by.
    """
    score = planned.objective.score
    found = [_searched(planner, planned, family) for family in families_of(planner, space or Space())]
    seen = [planned.best, *planned.runners_up, *planned.frontier, *(own.best for own in found if own.best is not None)]
    allowed = [weighed for weighed in seen if score(weighed) < float("inf")]
    for own in found:
        best = min((w for w in allowed if own.family.space.holds(w.plan)), key=score, default=own.best)
        yield own if best is own.best else replace(own, best=best, why_not="")


def _searched(planner: FleetPlanner, planned: Planned, family: Family) -> Outcome:
    """What a search for the family alone finds."""
    search = planner.search(family.space)
    objective = planned.objective
    goal = objective if objective.goal == "throughput" else Objective(usd_per_hour=objective.usd_per_hour)
    limit = float("inf") if objective.usd_per_hour is None else objective.usd_per_hour
    best = search.run(goal.score, prices=goal.rates(planner.fleet), budget=limit)
    known = [w for w in (best, *search.evaluated.values()) if w is not None and objective.score(w) < float("inf")]
    found = min(known, key=objective.score, default=None)
    return Outcome(family=family, best=found, why_not="" if found else why_not(search, objective))


def best_of_all(
    planned: Planned, found: Iterable[Outcome], accepts: Callable[[TemplatePlan], bool] | None = None
) -> Planned:
    """The search result with the best plan of a family where that is better: a search is limited in work, and does more in a smaller space.

    ``accepts``: only plans that it accepts count.
    """
    score = planned.objective.score
    rivals = [o.best for o in found if o.best is not None and (accepts is None or accepts(o.best.plan))]
    best = min([planned.best, *rivals], key=score)
    frontier = frontier_of([*planned.frontier, *rivals])
    if best.plan == planned.best.plan:
        return planned if frontier == planned.frontier else replace(planned, frontier=frontier)
    others = [w for w in (planned.best, *planned.runners_up) if w.plan != best.plan]
    return replace(planned, best=best, runners_up=tuple(others), frontier=frontier)


def _narrower(planner: FleetPlanner, space: Space) -> list[Family]:
    """Without the ways to share a stage that some device has."""
    known = [widths for pool in planner.fleet.pools for widths in planner.tables.costs.widths(pool.kind)]
    found = []
    if any(widths.context > 1 for widths in known):
        found.append(Family(name="no context parallelism", space=replace(space, max_context=1)))
    if any(widths.data > 1 for widths in known):
        found.append(Family(name="no stages that share a micro-batch", space=replace(space, max_data=1)))
    return found


def _by_schedule(space: Space) -> Iterator[Family]:
    """What the schedules beyond 1F1B bring: without any of them, and with one stage on each place."""
    if "1F1B" in space.schedules and len(space.schedules) > 1:
        yield Family(name="1F1B only", space=replace(space, schedules=("1F1B",)))
    plain = tuple(schedule for schedule in space.schedules if schedule not in INTERLEAVED)
    if plain not in (space.schedules, ("1F1B",)):
        yield Family(name="no interleaving", space=replace(space, schedules=plain))


def _by_pace(planner: FleetPlanner, space: Space) -> list[str]:
    """Kinds of devices that are in the space, by the samples/s of one device of a stage that holds the whole model, the fastest first."""
    pace: dict[str, float] = {}
    tables = planner.tables
    sizes = planner.search(space).kinds.sizes
    for pool in planner.fleet.pools:
        if space.pools is None or pool.name in space.pools:
            rates = [
                size / widths.devices / (table.forward_s(0, layers) + table.backward_s(0, layers, False))
                for size in sizes
                for widths in tables.costs.widths(pool.kind)
                if widths.copies == 1
                if (table := tables.table(pool.kind, widths, size)) is not None and (layers := len(table.costs))
            ]
            pace[pool.kind] = max(rates, default=0.0)
    return sorted(pace, key=lambda kind: (-pace[kind], kind))

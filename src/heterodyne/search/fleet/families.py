"""Families of plans, each a mask over the candidates: the best plan of each, or why there is none."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import inf

from heterodyne.search.fleet.explain import why_not
from heterodyne.search.fleet.objective import Objective
from heterodyne.search.fleet.plan import Candidate
from heterodyne.search.fleet.planner import FleetPlanner
from heterodyne.search.fleet.pool import CandidatePool
from heterodyne.search.fleet.space import Space

__all__ = ["Family", "families_of", "with_families"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """A named restriction of the search space, with its best plan, or why there is none."""

    name: str
    space: Space
    best: Candidate | None = None
    why_not: str = ""


def with_families(planner: FleetPlanner, pool: CandidatePool, space: Space) -> tuple[CandidatePool, tuple[Family, ...]]:
    """Return the pool with the best of a search for each family, and the families with the best of all candidates that are of them.

    A search is limited in work, and does more in a smaller space; it ends near its bound, so what one finds another may have passed by.
    """
    families = [_searched(planner, pool.objective, family) for family in families_of(planner, space)]
    others = (*pool.others, *(own.best for own in families if own.best is not None))
    every = replace(pool, others=others)
    bests = [every.best_of(own.space) or own.best for own in families]
    return every, tuple(
        own if best is own.best else replace(own, best=best, why_not="")
        for own, best in zip(families, bests, strict=True)
    )


def _searched(planner: FleetPlanner, objective: Objective, family: Family) -> Family:
    """What a search for the family alone finds."""
    search = planner.search(family.space)
    goal = objective if objective.by_time else Objective(usd_per_hour=objective.usd_per_hour)
    best = search.run(goal, budget=inf if objective.usd_per_hour is None else objective.usd_per_hour)
    found = replace(search.pool, objective=objective, others=() if best is None else (best,)).ranked
    return replace(family, best=found[0]) if found else replace(family, why_not=why_not(search, objective))


def families_of(planner: FleetPlanner, space: Space) -> tuple[Family, ...]:
    """Data parallelism only, pipelines only, without memory saving, without the slow kinds, each kind alone."""
    pools, known = planner.fleet.pools, [w for p in planner.fleet.pools for w in planner.costs.widths(p.kind)]
    masks = {
        "data parallel only": replace(space, max_stages=1, max_width=1, max_context=1, max_data=1),
        "no stages": replace(space, max_stages=1),
        "one pipeline": replace(space, max_pipelines=1),
        "no tensor parallelism": replace(space, max_width=1),
    }
    if any(widths.context > 1 for widths in known):
        masks["no context parallelism"] = replace(space, max_context=1)
    if any(widths.data > 1 for widths in known):
        masks["no stages that share a micro-batch"] = replace(space, max_data=1)
    masks["no recompute"] = replace(space, recompute=False)
    if "1F1B" in space.schedules and len(space.schedules) > 1:
        masks["1F1B only"] = replace(space, schedules=("1F1B",))
    if space.plain_schedules not in (space.schedules, ("1F1B",)):
        masks["no interleaving"] = replace(space, schedules=space.plain_schedules)
    for level in space.zero if len(space.zero) > 1 else ():
        masks[f"ZeRO-{level}" if level else "no state sharding"] = replace(space, zero=(level,))
    if len(pools) > 1:
        masks["no pipeline over several pools"] = replace(space, max_pools=1)
    kinds = _by_pace(planner, space)
    if len(kinds) > 2:
        fast = tuple(pool.name for pool in pools if pool.kind != kinds[-1])
        masks[f"without {kinds[-1]}, the slowest"] = replace(space, pools=fast)
    for kind in kinds if len(kinds) > 1 else ():
        masks[f"{kind} alone"] = replace(space, pools=tuple(pool.name for pool in pools if pool.kind == kind))
    return tuple(Family(name=name, space=mask) for name, mask in masks.items())


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

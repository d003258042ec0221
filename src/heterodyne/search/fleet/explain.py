"""A fleet plan in sentences: the parts of its step time, and why alternatives are slower."""

from __future__ import annotations

from itertools import combinations_with_replacement

from heterodyne.cluster.fleet import Fleet
from heterodyne.predictor.constants import constants
from heterodyne.search.explain import ratio_in_words
from heterodyne.search.fleet.evaluated_plan import EvaluatedPlan
from heterodyne.search.fleet.families import Outcome
from heterodyne.search.fleet.fleet_wires import collectives
from heterodyne.search.fleet.objective import Objective
from heterodyne.search.fleet.plan import TemplatePlan
from heterodyne.search.fleet.planner import Planned
from heterodyne.units import format_bytes, format_seconds

__all__ = ["family_in_words", "host_exchange_in_words", "step_in_words", "unjoined_in_words", "why_more"]

_MOST_TOLD = 3


def step_in_words(planned: Planned) -> str:
    """The parts of the best plan's step time, and its gap to the lower bound."""
    own = planned.best.predicted
    gradients = f"gradients {format_seconds(own.sync_s)}, " if own.sync_s else ""
    said = (
        f"Of a step of {format_seconds(own.step_s)}, pipelines take {format_seconds(own.pipelines_s)}, {gradients}"
        f"the update {format_seconds(own.update_s)}. The most that a device holds is {format_bytes(own.peak_bytes)}."
    )
    if 0 < planned.bound_s <= own.step_s:
        said += f" Lower bound of this search: {format_seconds(planned.bound_s)}."
    if planned.stopped:
        said += " The time was over before the search was; this is the best that it had found."
    return said


def host_exchange_in_words(fleet: Fleet, plan: TemplatePlan) -> str:
    """How devices without a common collectives library communicate, and the bandwidth assumed; "" where all share one."""
    libraries: dict[str, dict[str, None]] = {}
    for pool in plan.devices:
        libraries.setdefault(collectives(fleet, pool), {})[fleet.pool(pool).kind] = None
    if len(libraries) < 2:
        return ""
    who = " and ".join(f"{', '.join(kinds)} ({library})" for library, kinds in libraries.items())
    return (
        f"{who} exchange tensors in this plan, and their libraries do not talk to each other: what goes between them passes through the "
        f"memory of the hosts and through sockets (gloo), predicted at {constants().stated.sockets:.0%} of the link's bandwidth. Measure "
        "that path before you buy, and state it with --links if it carries less."
    )


def unjoined_in_words(fleet: Fleet, plan: TemplatePlan) -> str:
    """Of a plan that leaves devices out, between which of them no link is known; "" where all are joined, or all take part."""
    if all(plan.devices.get(pool.name) == pool.devices for pool in fleet.pools):
        return ""
    pairs = [
        f"the nodes of {a.name}" if a is b else f"{a.name} and {b.name}"
        for a, b in combinations_with_replacement(fleet.pools, 2)
        if (a is not b or a.nodes > 1) and fleet.wire(a, b) is None
    ]
    if not pairs:
        return ""
    shown = [*pairs[:_MOST_TOLD], *([f"{len(pairs) - _MOST_TOLD} more pairs"] if len(pairs) > _MOST_TOLD else [])]
    return f"No link is known between {', between '.join(shown)}, so none of them work together: state it under 'links', or with --links."


def family_in_words(outcome: Outcome, planned: Planned) -> str:
    """The best plan of a family against the best of all, or why the family has none."""
    if outcome.best is None:
        return f"impossible: {outcome.why_not}"
    return why_more(outcome.best, planned.best, planned.objective)


def why_more(other: EvaluatedPlan, best: EvaluatedPlan, objective: Objective) -> str:
    """By how much a plan is worse, and which part of its step is the cause."""
    if other.plan == best.plan:
        return "the best plan is one of these"
    ours, theirs = best.predicted, other.predicted
    value = {
        "throughput": (theirs.step_s, ours.step_s, "time"),
        "money": (theirs.usd or 0.0, ours.usd or 0.0, "money"),
        "energy": (theirs.joules or 0.0, ours.joules or 0.0, "energy"),
        "memory": (theirs.peak_bytes, ours.peak_bytes, "memory"),
    }[objective.goal]
    ratio = value[0] / value[1] if value[1] > 0 else 1.0
    said = ratio_in_words(ratio) if objective.goal == "throughput" else f"{ratio - 1:+.1%} {value[2]}"
    parts = {
        "in pipelines": theirs.pipelines_s - ours.pipelines_s,
        "for gradients": theirs.sync_s - ours.sync_s,
        "for the update": theirs.update_s - ours.update_s,
    }
    where, most = max(parts.items(), key=lambda part: part[1])
    if most > 0:
        said += f": {format_seconds(most)} more {where}"
    if theirs.devices != ours.devices:
        said += f", on {theirs.devices} devices"
    return said

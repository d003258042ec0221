"""A plan over a fleet in words: what runs where, what it takes, and why the others would cost more."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from heterodyne.search.explain import ratio_in_words
from heterodyne.search.fleet.families import Outcome
from heterodyne.search.fleet.objective import Objective
from heterodyne.search.fleet.plan import FleetPlan, Stage, Template
from heterodyne.search.fleet.planner import Planned
from heterodyne.search.fleet.predict import Weighed
from heterodyne.units import format_bytes, format_seconds

__all__ = ["explained", "plan_in_words", "template_in_words", "why_more"]


def template_in_words(template: Template) -> str:
    """``2 stages: 8 V100 layers 0-6 > A100 layers 7-25``; stages that are alike but for their layers are told together."""
    parts = []
    for key, run in groupby(template.stages, key=lambda stage: (stage.pool, stage.width, stage.recompute)):
        stages = list(run)
        pool, width, recompute = key
        wide = f" x{width}" if width > 1 else ""
        again = ", recomputed" if recompute else ""
        counts = _counts(stages)
        many = f"{len(stages)} stages of {counts} layers on {pool}{wide}" if len(stages) > 1 else ""
        parts.append((many or f"{counts} layer{'s' * (counts != '1')} on {pool}{wide}") + again)
    return " > ".join(parts)


def plan_in_words(plan: FleetPlan) -> list[str]:
    """A line for each group of pipelines."""
    lines = []
    for group in plan.groups:
        pipelines = f"{group.replicas} pipelines, each" if group.replicas > 1 else "1 pipeline,"
        lines.append(
            f"{pipelines} {group.num_microbatches} micro-batches of {group.template.micro_batch}: "
            f"{template_in_words(group.template)}"
        )
    return lines


def explained(planned: Planned, outcomes: Sequence[Outcome] = ()) -> str:
    """The best plan, the runners-up, and the best of each family or why it has none."""
    best = planned.best
    own = best.predicted
    how: list[str] = [best.plan.schedule] if any(len(group.template.stages) > 1 for group in best.plan.groups) else []
    how += ["optimizer state sharded"] if best.plan.shard_optimizer and best.plan.pipelines > 1 else []
    text = [
        f"{own.devices} devices, {best.plan.global_batch} samples in {format_seconds(own.step_s)}: {own.samples_per_s:.4g} samples/s"
        + (f", {', '.join(how)}" if how else "")
        + (f", {own.usd * 1e3 / best.plan.global_batch:.4g} usd for 1,000 samples" if own.usd is not None else "")
        + "."
    ]
    text += [f"  {line}" for line in plan_in_words(best.plan)]
    text.append(
        f"Of the step, pipelines take {format_seconds(own.pipelines_s)}, gradients {format_seconds(own.sync_s)}, the update "
        f"{format_seconds(own.update_s)}. The fullest device holds {format_bytes(own.peak_bytes)} "
        f"({own.peak_share:.0%} is the most of any memory)."
    )
    if 0 < planned.bound_s <= own.step_s:
        text.append(f"No plan can be faster than {format_seconds(planned.bound_s)}.")
    if planned.stopped:
        text.append("The search was stopped before its end; this is the best that it had found.")
    for other in planned.runners_up:
        text.append(f"Next: {'; '.join(plan_in_words(other.plan))}: {why_more(other, best, planned.objective)}.")
    for outcome in outcomes:
        if outcome.best is None:
            text.append(f"{outcome.family.name}: impossible: {outcome.why_not}.")
        else:
            text.append(f"{outcome.family.name}: {why_more(outcome.best, best, planned.objective)}.")
    return "\n".join(text)


def why_more(other: Weighed, best: Weighed, objective: Objective) -> str:
    """By how much, and which part of the step it is."""
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
    said = f"a step of {format_seconds(theirs.step_s)}"
    said += f", {ratio_in_words(ratio)}" if objective.goal == "throughput" else f", {ratio - 1:+.1%} {value[2]}"
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


def _counts(stages: Sequence[Stage]) -> str:
    counts = [stage.stop - stage.start for stage in stages]
    low, high = min(counts), max(counts)
    return str(low) if low == high else f"{low} to {high}"

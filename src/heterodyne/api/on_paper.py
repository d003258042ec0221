"""``heterodyne plan`` for devices that are not here: from datasheets, before anything is bought or booked."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from heterodyne.api.exports import Exports
from heterodyne.api.fleet_printing import show_change, show_fleet_plan
from heterodyne.api.paper_costs import captured, costs_of_job, shape_of
from heterodyne.api.watched import watched
from heterodyne.api.wishes import Wishes
from heterodyne.cluster.fleet import Fleet
from heterodyne.cluster.fleet_cluster import cluster_of
from heterodyne.cluster.fleet_file import load_fleet
from heterodyne.cluster.what_if import changed
from heterodyne.cost.layers import LayerCosts
from heterodyne.errors import ClusterError, PlanError
from heterodyne.graph.ir import ModelGraph
from heterodyne.job import Job
from heterodyne.plan.check import require_valid
from heterodyne.plan.plan import Plan
from heterodyne.plan.precision import Precision, Precisions, of_kind
from heterodyne.predictor.footprint import usable_bytes
from heterodyne.report.frontier import frontier_picture
from heterodyne.search.fleet.device_plan import device_plan
from heterodyne.search.fleet.families import Outcome, best_of_all, outcomes
from heterodyne.search.fleet.merged import merged
from heterodyne.search.fleet.planner import FleetPlanner, Planned
from heterodyne.search.fleet.space import Space
from heterodyne.search.fleet.timeline import fleet_timeline
from heterodyne.search.fleet.weighed import Weighed
from heterodyne.text_files import write_text
from heterodyne.units import counted, format_seconds

__all__ = ["FLEET_PLAN_VERSION", "plan_on_paper"]

FLEET_PLAN_VERSION = 1
_MOST_POOLS = 6
"""Of a fleet with more, alike pools of a zone are planned as one."""


def plan_on_paper(
    job: Job, base: Path, *, cluster_file: Path, out: Path, wishes: Wishes, say: Callable[[str], None]
) -> int:
    """Plan the job for the fleet of a file, print the choice with its reasons, and write it to ``out``.

    Raises ClusterError, JobError or InfeasibleError, each with what is wrong, where, and the remedy.
    """
    today = load_fleet(cluster_file)
    then = changed(today, add=wishes.add, without=wishes.without, links=wishes.links)
    costs_of = costs_of_job(job, base, profile=wishes.profile, framework=wishes.framework)
    count = counted(then.devices, "device")
    if wishes.profile is not None:
        say(f"planning on paper for {count}: seconds are those of the profile")
    else:
        say(f"planning on paper for {count}: from datasheets; nothing is measured")
        for kind in () if job.training.precision == "auto" else _without_units(then, job.training.precision):
            instead = (
                "fp32 speed is assumed" if wishes.framework is None else "the speed of the nearest precision is assumed"
            )
            say(f"{kind} has no {job.training.precision} tensor cores by its datasheet; {instead}")
    space = _space(wishes)
    planner, found, families = _with_families(job, then, costs_of, wishes, space, say, out)
    plan: Plan | None = None
    if wishes.runnable is not None:
        graph = captured(job, base)
        try:
            plan = _runnable(job, found, then, graph)
        except PlanError as error:
            # Whether a stage may lie in parts beside others depends on what crosses its borders in this model.
            why = str(error).splitlines()[:2][-1].strip(" -")
            say(f"the fastest plan does not run here: {why}; planning again with one device a stage")
            space = replace(space, max_width=1, max_context=1, max_data=1)
            planner, found, families = _with_families(job, then, costs_of, wishes, space, say, out)
            plan = _runnable(job, found, then, graph)
    seq = job.data.sequence_length if shape_of(job.model, base) is not None else None
    told = json.dumps(_told(planner.fleet, found), indent=1) + "\n"
    if wishes.as_json:
        sys.stdout.write(told)
    else:
        show_fleet_plan(
            _known(then),
            planner,
            found,
            space=space,
            seq=seq,
            frontier=wishes.frontier,
            families=families,
        )
    if found.stopped:
        say("the search was stopped before it was done: there may be better plans")
    if then is not today and not wishes.as_json:
        _, before = _planned(job, today, costs_of, wishes, space, say, out)
        what = [*(f"add {text}" for text in wishes.add), *(f"without {text}" for text in wishes.without), *wishes.links]
        show_change(before.best, found.best, ", ".join(what))
    write_text(out, told)
    say(f"wrote {out}")
    if wishes.export is not None:
        exports = _exports(job, planner, wishes.export, out)
        if found.refused is not None:
            theirs, ours = (format_seconds(own.predicted.step_s) for own in (found.refused, found.best))
            why = exports.refused(found.refused.plan)
            say(f"a plan with a step of {theirs} instead of {ours} cannot be exported: {why}")
        for path, text in exports.files(found.best.plan).items():
            write_text(path, text)
            say(f"wrote {path}")
    if wishes.runnable is not None and plan is not None:
        plan.save(wishes.runnable)
        say(f"wrote {wishes.runnable}")
    if wishes.timeline is not None:
        step = fleet_timeline(planner.search(Space()).predictor, found.best)
        write_text(wishes.timeline, json.dumps(step.to_perfetto()))
        say(
            f"wrote {wishes.timeline} ({len(step.devices)} ranks that stand for {found.best.predicted.devices:,} devices)"
        )
    if wishes.picture is not None:
        frontier_picture(found.frontier, wishes.picture, title=f"{job.training.global_batch_size} samples a step")
        say(f"wrote {wishes.picture}")
    return 0


def _without_units(fleet: Fleet, precision: str) -> list[str]:
    """Kinds that would have to do without the precision; fp32 every device has."""
    known = {kind: fleet.accelerator(kind).peak_flops for kind in fleet.kinds if kind != "cpu"}
    return [kind for kind, peaks in known.items() if precision != "fp32" and precision not in peaks]


def _known(fleet: Fleet) -> Fleet:
    """As it is planned."""
    return merged(fleet) if len(fleet.pools) > _MOST_POOLS else fleet


def _planned(
    job: Job,
    fleet: Fleet,
    costs_of: Callable[[Fleet], LayerCosts],
    wishes: Wishes,
    space: Space,
    say: Callable[[str], None],
    out: Path,
) -> tuple[FleetPlanner, Planned]:
    if wishes.objective.goal == "money" or wishes.objective.usd_per_hour is not None:
        fleet.require_prices()
    fleet = _known(fleet)
    costs = costs_of(fleet)
    fleet = replace(fleet, pools=tuple(replace(p, memory_bytes=usable_bytes(p.memory_bytes)) for p in fleet.pools))
    planner = FleetPlanner(fleet=fleet, costs=costs, global_batch=job.training.global_batch_size)
    plan = planner.plan if wishes.export is None else _exports(job, planner, wishes.export, out).plan
    with watched(wishes.seconds, say) as watch:
        return planner, plan(wishes.objective, space=space, watch=watch, frontier=wishes.frontier)


def _with_families(
    job: Job,
    fleet: Fleet,
    costs_of: Callable[[Fleet], LayerCosts],
    wishes: Wishes,
    space: Space,
    say: Callable[[str], None],
    out: Path,
) -> tuple[FleetPlanner, Planned, tuple[Outcome, ...]]:
    """With the best of each kind of plan, where that was asked for; the best of all of them is the plan."""
    planner, found = _planned(job, fleet, costs_of, wishes, space, say, out)
    if not wishes.families or found.stopped:
        return planner, found, ()
    say("searching for the best of each kind of plan")
    families = tuple(outcomes(planner, found, space))
    accepts = None if wishes.export is None else _exports(job, planner, wishes.export, out).takes
    return planner, best_of_all(found, families, accepts), families


def _space(wishes: Wishes) -> Space:
    """The plans that those can run for whom one is made."""
    space = Space()
    if wishes.export == "megatron":
        space = replace(space, schedules=("1F1B", "Interleaved1F1B"))
    if wishes.export == "torchtitan":
        space = replace(space, schedules=("1F1B", "GPipe", "Interleaved1F1B", "InterleavedZeroBubble"))
    # The runtime keeps all state whole on every replica.
    return space if wishes.runnable is None else replace(space, zero=(0,), runnable=True)


def _runnable(job: Job, found: Planned, fleet: Fleet, graph: ModelGraph) -> Plan:
    if {stage.pool for g in found.best.plan.groups for stage in g.template.stages} - {
        pool.name for pool in fleet.pools
    }:
        raise ClusterError(
            f"pools of fleet {fleet.name!r} were planned together, for it has more than {_MOST_POOLS}; to run a plan, take fewer of them"
        )
    made = device_plan(found.best.plan, fleet, graph).model_copy(update={"precision": _precisions(job, fleet)})
    require_valid(made, graph, cluster_of(fleet))
    return made


def _precisions(job: Job, fleet: Fleet) -> Precisions:
    """Of each kind, as far as datasheets tell."""
    if job.training.precision != "auto":
        return job.training.precision
    found = {kind: of_kind("cuda", bf16_units="bf16" in fleet.accelerator(kind).peak_flops) for kind in fleet.kinds}
    return found if len(set(found.values())) > 1 else next(iter(found.values()))


def _paper_precision(job: Job) -> Precision:
    return "bf16" if job.training.precision == "auto" else job.training.precision


def _exports(job: Job, planner: FleetPlanner, framework: str, out: Path) -> Exports:
    return Exports(
        framework=framework,
        planner=planner,
        precision=_paper_precision(job),
        out=out,
    )


def _told(fleet: Fleet, found: Planned) -> dict[str, Any]:
    """For programs; `kind` and `version` say what it is."""

    def one(weighed: Weighed) -> dict[str, Any]:
        return {"plan": asdict(weighed.plan), "predicted": asdict(weighed.predicted)}

    return {
        "kind": "fleet plan",
        "version": FLEET_PLAN_VERSION,
        "fleet": fleet.name,
        "devices": fleet.devices,
        "objective": asdict(found.objective),
        **one(found.best),
        "bound_s": found.bound_s,
        "runners_up": [one(weighed) for weighed in found.runners_up],
        "frontier": [one(weighed) for weighed in found.frontier],
    }

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
from heterodyne.api.paper_costs import captured, costs_of_job, paper_precisions, shape_of
from heterodyne.api.paper_devices import FEW_DEVICES, plan_by_device
from heterodyne.api.watched import watched
from heterodyne.api.wishes import Wishes
from heterodyne.cluster.fleet import Fleet
from heterodyne.cluster.fleet_cluster import cluster_of
from heterodyne.cluster.fleet_file import load_fleet
from heterodyne.cluster.what_if import changed
from heterodyne.cost.layers import LayerCosts
from heterodyne.errors import ClusterError, InfeasibleError, PlanError
from heterodyne.graph.ir import ModelGraph
from heterodyne.job import Job
from heterodyne.plan.bind import bind
from heterodyne.plan.check import require_valid
from heterodyne.plan.plan import Plan
from heterodyne.plan.precision import Precision
from heterodyne.predictor.footprint import usable_bytes
from heterodyne.predictor.mixed_layers import MixedLayers
from heterodyne.predictor.software import software_of
from heterodyne.report.frontier import frontier_picture
from heterodyne.search.fleet.families import Outcome, best_of_all, outcomes
from heterodyne.search.fleet.merged import merged
from heterodyne.search.fleet.planner import FleetPlanner, Planned
from heterodyne.search.fleet.space import Space
from heterodyne.search.fleet.timeline import fleet_timeline
from heterodyne.search.fleet.weighed import Weighed
from heterodyne.search.fleet.written import written
from heterodyne.text_files import write_text
from heterodyne.units import counted, format_seconds

__all__ = ["plan_on_paper"]

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
        costs = costs_of(then)
        if isinstance(costs, MixedLayers) and (where := costs.in_words(then.kinds)):
            say(where)
    else:
        say(f"planning on paper for {count}: from datasheets; nothing is measured")
        for kind in () if job.training.precision == "auto" else _without_units(then, job.training.precision):
            instead = (
                "fp32 speed is assumed" if wishes.framework is None else "the speed of the nearest precision is assumed"
            )
            say(f"{kind} has no {job.training.precision} tensor cores by its datasheet; {instead}")
    space = _space(wishes, job)
    if job.parallelism.strategy != "auto":
        say(
            f"parallelism.strategy {job.parallelism.strategy} is not heeded where alike devices are counted: --families shows the best "
            "of each kind of plan"
        )
    try:
        planner, found, families = _with_families(job, then, costs_of, wishes, space, say, out)
    except InfeasibleError as error:
        if then.devices <= FEW_DEVICES and wishes.just_a_plan:
            return plan_by_device(job, then, captured(job, base), out=out, as_json=wishes.as_json, say=say)
        raise _elsewhere(error, job, then, costs_of, wishes, say, out) from error
    if wishes.runnable:
        graph = captured(job, base)
        try:
            _require_runnable(job, found, then, graph)
        except PlanError as error:
            # Whether a stage may lie in parts beside others depends on what crosses its borders in this model.
            why = str(error).splitlines()[:2][-1].strip(" -")
            say(f"the fastest plan does not run here: {why}; planning again with one device a stage")
            space = replace(space, max_width=1, max_context=1, max_data=1)
            planner, found, families = _with_families(job, then, costs_of, wishes, space, say, out)
            _require_runnable(job, found, then, graph)
    seq = job.data.sequence_length if shape_of(job.model, base) is not None else None
    if wishes.as_json:
        sys.stdout.write(json.dumps(_told(job, planner.fleet, found), indent=1) + "\n")
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
    _written(job, planner.fleet, found.best, f"the best found for {found.objective.goal}").save(out)
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
    fleet = replace(
        fleet, pools=tuple(replace(p, memory_bytes=usable_bytes(p.memory_bytes, p.backend)) for p in fleet.pools)
    )
    software = software_of(wishes.framework)
    planner = FleetPlanner(
        fleet=fleet,
        costs=costs,
        global_batch=job.training.global_batch_size,
        blocking=not software.overlap_sends,
        overlap=software.overlap_gradients,
    )
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


def _space(wishes: Wishes, job: Job) -> Space:
    """The plans that those can run for whom one is made."""
    sizes = job.parallelism.micro_batch_sizes
    space = Space(micro_batches=None if sizes == "auto" else sizes)
    if wishes.export == "megatron":
        space = replace(space, schedules=("1F1B", "Interleaved1F1B"))
    if wishes.export == "torchtitan":
        space = replace(space, schedules=("1F1B", "GPipe", "Interleaved1F1B", "InterleavedZeroBubble"))
    return space if wishes.for_others else space.that_runs()


def _elsewhere(
    error: InfeasibleError,
    job: Job,
    fleet: Fleet,
    costs_of: Callable[[Fleet], LayerCosts],
    wishes: Wishes,
    say: Callable[[str], None],
    out: Path,
) -> InfeasibleError:
    """With what a plan would reach that this library does not run, if there is one."""
    if wishes.for_others:
        return error
    try:
        _, found = _planned(job, fleet, costs_of, replace(wishes, frontier=False), Space(), say, out)
    except InfeasibleError:
        return error
    best = found.best
    how = f"with state shared over replicas (ZeRO-{best.plan.zero})" if best.plan.zero else "with other stages"
    return InfeasibleError(
        f"{error}. {how[0].upper()}{how[1:]}, which this version does not run, a step would take {format_seconds(best.predicted.step_s)}: "
        "--framework NAME plans for a framework that has it"
    )


def _require_runnable(job: Job, found: Planned, fleet: Fleet, graph: ModelGraph) -> None:
    """Raises PlanError or ClusterError if the plan does not run with this model on these devices."""
    if {stage.pool for g in found.best.plan.groups for stage in g.template.stages} - {
        pool.name for pool in fleet.pools
    }:
        raise ClusterError(
            f"pools of fleet {fleet.name!r} were planned together, for it has more than {_MOST_POOLS}; to run a plan, take fewer of them"
        )
    cluster = cluster_of(fleet)
    made = bind(_written(job, fleet, found.best, ""), graph, cluster)
    require_valid(made, graph, cluster)


def _written(job: Job, fleet: Fleet, found: Weighed, reason: str) -> Plan:
    return written(found, fleet, precision=paper_precisions(job, fleet), reason=reason)


def _paper_precision(job: Job) -> Precision:
    return "bf16" if job.training.precision == "auto" else job.training.precision


def _exports(job: Job, planner: FleetPlanner, framework: str, out: Path) -> Exports:
    return Exports(
        framework=framework,
        planner=planner,
        precision=_paper_precision(job),
        out=out,
    )


def _told(job: Job, fleet: Fleet, found: Planned) -> dict[str, Any]:
    """For programs: plans as their files have them, and what is predicted of them in full."""

    def one(weighed: Weighed) -> dict[str, Any]:
        return {
            "plan": json.loads(_written(job, fleet, weighed, "").dump()),
            "predicted": asdict(weighed.predicted),
        }

    return {
        "kind": "plans",
        "fleet": fleet.name,
        "devices": fleet.devices,
        "objective": asdict(found.objective),
        **one(found.best),
        "bound_s": found.bound_s,
        "runners_up": [one(weighed) for weighed in found.runners_up],
        "frontier": [one(weighed) for weighed in found.frontier],
    }

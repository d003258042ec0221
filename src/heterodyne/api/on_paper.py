"""``heterodyne plan`` for devices that are not here: from datasheets, before anything is bought or booked."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from heterodyne.api.paper_costs import captured, costs_of_job, paper_precisions, shape_of
from heterodyne.api.paper_devices import FEW_DEVICES, by_datasheets, planned_by_device
from heterodyne.api.printing import result_json, show, show_result
from heterodyne.api.watched import watched
from heterodyne.api.wishes import Exports, Wishes
from heterodyne.cluster.fleet import Fleet, Pool
from heterodyne.cluster.fleet_cluster import cluster_of
from heterodyne.cluster.fleet_file import load_fleet
from heterodyne.cluster.spec import Cluster
from heterodyne.cluster.what_if import changed
from heterodyne.cost.graph_layers import GraphLayers
from heterodyne.cost.layers import LayerCosts, compute_s, least_bytes
from heterodyne.errors import ClusterError, InfeasibleError, PlanError
from heterodyne.job import Job
from heterodyne.plan.bind import bind
from heterodyne.plan.capabilities import Capabilities
from heterodyne.plan.check import require_valid
from heterodyne.predictor.scaled_times import ScaledTimes
from heterodyne.predictor.software import Software, software_of
from heterodyne.predictor.usable import context_bytes, usable_bytes
from heterodyne.report.frontier import frontier_picture
from heterodyne.report.plan_tables import changed_rows
from heterodyne.report.sites import sites_picture, way_rows, ways_json
from heterodyne.search.explain import result_of
from heterodyne.search.fleet.evaluator import StoppedError
from heterodyne.search.fleet.merged import merged
from heterodyne.search.fleet.planner import FleetPlanner
from heterodyne.search.fleet.sites import Outer, Way, ways_over_sites
from heterodyne.search.fleet.space import Space
from heterodyne.search.fleet.written import FleetResult, PaperPlanner
from heterodyne.search.result import PlanningResult
from heterodyne.text_files import write_text
from heterodyne.units import counted, format_bytes, format_seconds

__all__ = ["plan_on_paper"]

_MOST_POOLS = 6
"""Of a fleet with more, alike pools of a zone are planned as one."""


def plan_on_paper(
    job: Job, base: Path, *, cluster_file: Path, out: Path, wishes: Wishes, say: Callable[[str], None]
) -> int:
    """Plan the job for the fleet of a file, print the choice with its reasons, and write it to ``out``.

    Raises ClusterError, JobError or InfeasibleError, each with what is wrong, where, and the remedy; PlanError, when all else is printed
    and written, if the plan cannot be exported as asked.
    """
    today = load_fleet(cluster_file)
    then = changed(today, add=wishes.add, without=wishes.without, links=wishes.links)
    costs_of = costs_of_job(job, base, profile=wishes.profile, framework=wishes.framework)
    paper = _Paper(job=job, base=base, out=out, wishes=wishes, say=say, costs_of=costs_of)
    paper.announce(then)
    if wishes.sites:
        paper.compare_sites(then)
        return 0
    result, devices = paper.found(then)
    before = paper.search(today, paper.space) if then is not today and not wishes.as_json else None
    result.plan.save(out)
    paper.print(result, devices)
    if before is not None:
        what = [*(f"add {text}" for text in wishes.add), *(f"without {text}" for text in wishes.without), *wishes.links]
        show(changed_rows(before.plan, result.plan, ", ".join(what)))
    say(f"wrote {out}")
    if result.stopped:
        say("the search was stopped before it was done: there may be better plans")
    paper.write(result)
    return 0


@dataclass(frozen=True, kw_only=True)
class _Paper:
    """One command: the job, what is asked for, and where it is written."""

    job: Job
    base: Path
    out: Path
    wishes: Wishes
    say: Callable[[str], None]
    costs_of: Callable[[Fleet], LayerCosts]

    def announce(self, fleet: Fleet) -> None:
        """Say where the seconds come from, and what the job asks for that datasheets or this search do not know."""
        count = counted(fleet.devices, "device")
        precision, strategy = self.job.training.precision, self.job.parallelism.strategy
        if self.wishes.profile is not None:
            self.say(f"planning on paper for {count}: seconds are those of the profile")
            costs = self.costs_of(fleet)
            times = costs.times if isinstance(costs, GraphLayers) else None
            if isinstance(times, ScaledTimes) and (where := times.in_words(fleet.kinds)):
                self.say(where)
        else:
            self.say(f"planning on paper for {count}: from datasheets; nothing is measured")
            instead = "fp32 speed" if self.wishes.framework is None else "the speed of the nearest precision"
            for kind in () if precision == "auto" else _without_units(fleet, precision):
                self.say(f"{kind} has no {precision} tensor cores by its datasheet; {instead} is assumed")
        software = software_of(self.wishes.framework)
        for pool in fleet.pools:
            if _room(pool, software) <= 0:
                buffers = f" and {format_bytes(software.buffer_bytes)} for buffers" if software.buffer_bytes else ""
                self.say(
                    f"{pool.name}: the {format_bytes(pool.memory_bytes)} of a {pool.kind} are less than a process takes before there is a "
                    f"model ({format_bytes(context_bytes(pool.backend))}{buffers}), so nothing is planned on it"
                )
        if precision == "fp32" and self.wishes.profile is None and (faster := self._faster_in_16_bits(fleet)):
            self.say(f"in 16 bits {faster} (--set training.precision=auto)")
        if strategy != "auto":
            self.say(
                f"parallelism.strategy {strategy} is not heeded where alike devices are counted: --families shows the best of each kind "
                "of plan"
            )
        if self.job.parallelism.asynchronous is not None:
            self.say(
                "parallelism.async is ignored when planning for a fleet: the plan is exact, and flushes its pipelines after each step"
            )

    def _faster_in_16_bits(self, fleet: Fleet) -> str:
        """Return how many times as fast kinds of devices would compute the layers of the model; "" where no kind has units for that."""
        training = self.job.training.model_copy(update={"precision": "auto"})
        job = self.job.model_copy(update={"training": training})
        mixed = costs_of_job(job, self.base, framework=self.wishes.framework)(fleet)
        ratios = {
            kind: compute_s(self.costs_of(fleet), kind) / (compute_s(mixed, kind) or math.inf) for kind in fleet.kinds
        }
        told = [f"{kind} computes {ratio:.1f} times as fast" for kind, ratio in ratios.items() if ratio > 1.05]
        return " and ".join(told)

    def found(self, fleet: Fleet) -> tuple[PlanningResult, Cluster | Fleet]:
        """The best plan, and the devices as it was planned for them. Raises InfeasibleError."""
        self._require_room(fleet)
        try:
            result = self._with_families(fleet, self.space)
        except StoppedError:
            raise
        except InfeasibleError as error:
            if fleet.devices > FEW_DEVICES or not self.wishes.just_a_plan:
                raise self._elsewhere(error, fleet) from error
            self.say(
                "no plan fits that counts alike devices; searching device by device, with state sharded by memory and on hosts"
            )
            graph = captured(self.job, self.base)
            planned = planned_by_device(self.job, *by_datasheets(self.job, fleet, graph), graph)
            return result_of(planned), planned.cluster
        if self.wishes.runnable:
            able = Capabilities(captured(self.job, self.base), self.job.optimizer.reach)
            try:
                _require_runnable(result, fleet, able)
            except PlanError as error:
                # Whether a stage may be sharded beside others depends on what crosses its borders in this model.
                why = str(error).splitlines()[:2][-1].strip(" -")
                self.say(f"the fastest plan does not run here: {why}; planning again with one device a stage")
                result = self._with_families(fleet, replace(self.space, max_width=1, max_context=1, max_data=1))
                _require_runnable(result, fleet, able)
        return result, _known(fleet)

    def _require_room(self, fleet: Fleet) -> None:
        """Raises InfeasibleError where one copy of the weights and gradients, however they are sharded, is more than all devices have."""
        costs, software = self.costs_of(fleet), software_of(self.wishes.framework)
        rooms = {pool.name: max(0, _room(pool, software)) for pool in fleet.pools}
        room = sum(pool.devices * rooms[pool.name] for pool in fleet.pools)
        needed = min(least_bytes(costs, kind) for kind in fleet.kinds)
        if needed > room:
            raise InfeasibleError(
                f"one copy of the weights and as much for their gradients are {format_bytes(needed)}, however they are sharded, and "
                f"{counted(fleet.devices, 'device')} have {format_bytes(room)} for them: no plan trains this model here. Add "
                f"{format_bytes(needed - room)} or more, such as {math.ceil((needed - room) / max(rooms.values()))} more of "
                f"{max(rooms, key=rooms.__getitem__)}, and as much again for what the optimizer keeps"
                if any(rooms.values())
                else "no device has room for a model"
            )

    def search(self, fleet: Fleet, space: Space) -> FleetResult:
        planner, wishes = self._planner(fleet), self.wishes
        with watched(wishes.seconds, self.say) as watch:
            if self.exports is None:
                return planner.plan(wishes.objective, space=space, watch=watch, frontier=wishes.frontier)
            return planner.plan_for(
                self.exports.takes, wishes.objective, space=space, watch=watch, frontier=wishes.frontier
            )

    def compare_sites(self, fleet: Fleet) -> None:
        """Print the ways over the sites of the fleet, the fastest first, and what a job says to train apart. Raises ClusterError."""
        samples, sync = self.job.training.global_batch_size, self.job.training.sync
        every = Outer().every if sync is None else max(map(sync.every_of, sync.shares))
        outer = Outer(every=every) if sync is None else Outer(every=every, bits=sync.bits, delay=sync.delay)
        with watched(self.wishes.seconds, self.say) as watch:
            ways = ways_over_sites(self._planner(fleet).planner, self.space, outer, watch=watch)
        if self.wishes.as_json:
            sys.stdout.write(ways_json(ways) + "\n")
        else:
            show(way_rows(ways, samples))
            self.say(_inexact(ways))
        if self.wishes.picture is not None:
            sites_picture(ways, self.wishes.picture, title=f"{fleet.name}: {samples} samples a step")
            self.say(f"wrote {self.wishes.picture}")

    def _with_families(self, fleet: Fleet, space: Space) -> FleetResult:
        """With the best of each kind of plan, where that was asked for."""
        result = self.search(fleet, space)
        if not self.wishes.families or result.stopped:
            return result
        self.say("searching for the best of each kind of plan")
        return self._planner(fleet).with_families(result, space)

    def _planner(self, fleet: Fleet) -> PaperPlanner:
        objective, software = self.wishes.objective, software_of(self.wishes.framework)
        if objective.goal == "money" or objective.usd_per_hour is not None:
            fleet.require_prices()
        fleet = _known(fleet)
        # A pool without room stays, so that links and answers can name it; no stage fits into a byte.
        usable = tuple(replace(pool, memory_bytes=max(1, _room(pool, software))) for pool in fleet.pools)
        planner = FleetPlanner(
            fleet=replace(fleet, pools=usable),
            costs=self.costs_of(fleet),
            global_batch=self.job.training.global_batch_size,
            software=software,
        )
        return PaperPlanner(planner=planner, precision=paper_precisions(self.job, fleet))

    @cached_property
    def exports(self) -> Exports | None:
        precision = self.job.training.precision
        if self.wishes.export is None:
            return None
        return Exports(
            framework=self.wishes.export, precision="bf16" if precision == "auto" else precision, out=self.out
        )

    @cached_property
    def space(self) -> Space:
        """The plans that those can run for whom one is made."""
        sizes = self.job.parallelism.micro_batch_sizes
        space = Space(micro_batches=None if sizes == "auto" else sizes)
        if self.wishes.export == "megatron":
            space = replace(space, schedules=("1F1B", "Interleaved1F1B"))
        if self.wishes.export == "torchtitan":
            space = replace(space, schedules=("1F1B", "GPipe", "Interleaved1F1B", "InterleavedZeroBubble"))
        return space if self.wishes.for_others else space.that_runs()

    def _elsewhere(self, error: InfeasibleError, fleet: Fleet) -> InfeasibleError:
        """With what a plan would reach that this library does not run, if there is one."""
        if self.wishes.for_others:
            return error
        try:
            best = replace(self, wishes=replace(self.wishes, frontier=False)).search(fleet, Space()).plan
        except InfeasibleError:
            return error
        assert best.predicted is not None  # the search predicts what it finds
        how = f"With state sharded over replicas (ZeRO-{best.zero})" if best.zero else "With other stages"
        return InfeasibleError(
            f"{error}. {how}, which this version does not run, a step would take {format_seconds(best.predicted.step_s)}: "
            "--framework NAME plans for a framework that has it"
        )

    def print(self, result: PlanningResult, devices: Cluster | Fleet) -> None:
        if self.wishes.as_json:
            export = None
            if self.exports is not None:
                why = self.exports.refused(result.plan)
                files = [] if why else list(map(str, self.exports.files(result.plan)))
                export = {"framework": self.exports.framework, "files": files, "refused": why}
            sys.stdout.write(result_json(result, devices, objective=self.wishes.objective, export=export))
            return
        shape = shape_of(self.job.model, self.base)
        seq = None if shape is None else self.job.data.sequence_length
        show_result(result, devices, seq=seq, frontier=self.wishes.frontier)

    def write(self, result: PlanningResult) -> None:
        """Write what is asked for beside the plan. Raises PlanError for one that cannot be exported, when all else is written."""
        if self.wishes.timeline is not None:
            step = result.timeline()
            write_text(self.wishes.timeline, json.dumps(step.to_perfetto()))
            ranks = f"{len(step.devices)} ranks that stand for {result.plan.device_count:,} devices"
            self.say(f"wrote {self.wishes.timeline} ({ranks})")
        if self.wishes.picture is not None:
            title = f"{self.job.training.global_batch_size} samples a step"
            frontier_picture(result.frontier, self.wishes.picture, title=title)
            self.say(f"wrote {self.wishes.picture}")
        if self.exports is None:
            return
        if why := self.exports.refused(result.plan):
            raise PlanError(f"{self.out} is written; it cannot be exported for {self.exports.framework}: {why}")
        if result.refused is not None and result.refused.predicted is not None and result.plan.predicted is not None:
            theirs, ours = (format_seconds(own.step_s) for own in (result.refused.predicted, result.plan.predicted))
            why = self.exports.refused(result.refused)
            faster = "about as fast" if theirs == ours else f"with a step of {theirs} instead of {ours}"
            self.say(f"a plan {faster} cannot be exported: {why}")
        for path, text in self.exports.files(result.plan).items():
            write_text(path, text)
            self.say(f"wrote {path}")


def _inexact(ways: Sequence[Way]) -> str:
    """Return how the fastest way is asked for."""
    best = ways[0]
    if best.outer is None:
        return f"the fastest is exact, {best.name}: plan it without --sites"
    shares = ", ".join(f"{name}: {count}" for name, count in best.shares.items())
    return (
        f"the fastest, {best.name}, is inexact: the losses are not those of one device. A job asks for it with\n"
        f"training:\n  sync: {{sites: outer, shares: {{{shares}}}, at: HOST:PORT, every: {best.outer.every}, bits: {best.outer.bits}, "
        f"delay: {best.outer.delay}}}"
    )


def _room(pool: Pool, software: Software) -> int:
    """Bytes of a device that a plan may fill; 0 or less where there is none."""
    return usable_bytes(pool.memory_bytes, pool.backend) - software.buffer_bytes


def _without_units(fleet: Fleet, precision: str) -> list[str]:
    """Kinds that would have to do without the precision; fp32 every device has."""
    known = {kind: fleet.accelerator(kind).peak_flops for kind in fleet.kinds if kind != "cpu"}
    return [kind for kind, peaks in known.items() if precision != "fp32" and precision not in peaks]


def _known(fleet: Fleet) -> Fleet:
    """As it is planned."""
    return merged(fleet) if len(fleet.pools) > _MOST_POOLS else fleet


def _require_runnable(result: PlanningResult, fleet: Fleet, able: Capabilities) -> None:
    """Raises PlanError or ClusterError if the plan does not run with this model on these devices."""
    nodes = {stage.group.node for pipeline in result.plan.pipelines for stage in pipeline.stages if stage.group}
    if nodes - {pool.node_name for pool in fleet.pools}:
        raise ClusterError(
            f"pools of fleet {fleet.name!r} were planned together, for it has more than {_MOST_POOLS}; to run a plan, take fewer of them"
        )
    cluster = cluster_of(fleet)
    require_valid(bind(result.plan, able.graph, cluster), able.graph, cluster, able)

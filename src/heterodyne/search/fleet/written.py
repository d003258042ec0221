"""The interface of the fleet search: its compact plans inside, `Plan` outside.

Such a plan names device kinds and counts, no ids (see `plan.bind`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import groupby
from typing import Literal, cast

from heterodyne.cluster.fleet import Fleet
from heterodyne.errors import InfeasibleError
from heterodyne.plan.mesh import Kind
from heterodyne.plan.micro_batches import MicroBatches
from heterodyne.plan.plan import Axis, Group, Layout, Pipeline, Plan, Prediction, Region, Stage
from heterodyne.plan.precision import Precisions
from heterodyne.plan.schedules import SCHEDULES
from heterodyne.plan.schedules.clock import play
from heterodyne.plan.schedules.times import Read
from heterodyne.plan.short import in_short
from heterodyne.search.fleet.evaluator import Watch
from heterodyne.search.fleet.explain import (
    host_exchange_in_words,
    step_in_words,
    unjoined_in_words,
    why_more,
)
from heterodyne.search.fleet.families import with_families
from heterodyne.search.fleet.objective import Objective
from heterodyne.search.fleet.plan import Candidate, Template, TemplateGroup, TemplatePlan, TemplateStage
from heterodyne.search.fleet.planner import FleetPlanner
from heterodyne.search.fleet.pool import CandidatePool
from heterodyne.search.fleet.predict import Predictor
from heterodyne.search.fleet.space import Space
from heterodyne.search.result import AlternativeRow, PlanningResult
from heterodyne.timeline import Event, Timeline

__all__ = ["FleetResult", "PaperPlanner", "fleet_timeline", "written_plan"]


@dataclass(frozen=True, kw_only=True)
class FleetResult(PlanningResult):
    """The result of a search over device classes. Only this module looks into its candidates."""

    _pool: CandidatePool = field(repr=False)


@dataclass(frozen=True, kw_only=True)
class PaperPlanner:
    """The search over device classes, with plans that name kinds and counts."""

    planner: FleetPlanner
    precision: Precisions = "fp32"

    @property
    def fleet(self) -> Fleet:
        return self.planner.fleet

    def plan(
        self,
        objective: Objective | None = None,
        *,
        space: Space,
        watch: Watch | None = None,
        frontier: bool = False,
        accepts: Callable[[Plan], bool] | None = None,
    ) -> FleetResult:
        """The best plan; of the accepted ones, if there are any.

        Raises InfeasibleError and ClusterError as the planner does.
        """
        takes = None if accepts is None else (lambda plan: accepts(self._plan(plan)))
        return self._result(self.planner.plan(objective, space=space, watch=watch, frontier=frontier, accepts=takes))

    def plan_for(
        self, accepts: Callable[[Plan], bool], objective: Objective, *, space: Space, watch: Watch, frontier: bool
    ) -> FleetResult:
        """The best accepted plan over all device kinds, else over one kind; else the best of all, marked as refused."""
        found = self.plan(objective, space=space, watch=watch, frontier=frontier, accepts=accepts)
        if accepts(found.plan) or len(self.fleet.kinds) == 1:
            return found
        alone = []
        for kind in self.fleet.kinds:
            pools = tuple(pool.name for pool in self.fleet.pools if pool.kind == kind)
            try:
                own = self.plan(objective, space=replace(space, pools=pools), watch=watch, accepts=accepts)
            except InfeasibleError:
                continue
            alone += [own] if accepts(own.plan) else []
        if not alone:
            return found
        best = min(alone, key=lambda own: objective.score(own._pool.best))
        return replace(best, bound_s=found.bound_s, frontier=found.frontier, refused=found.plan)

    def with_families(self, result: FleetResult, space: Space) -> FleetResult:
        """With the best plan of each family; the best accepted one of all becomes the plan."""
        pool, families = with_families(self.planner, result._pool, space)
        rows = (
            AlternativeRow(
                name=own.name,
                plan=None if own.best is None else self._predicted(own.best),
                note=f"impossible: {own.why_not}"
                if own.best is None
                else why_more(own.best, pool.best, pool.objective),
            )
            for own in families
        )
        return replace(self._result(pool), families=tuple(rows))

    def _result(self, pool: CandidatePool) -> FleetResult:
        best, fleet = pool.best, self.fleet
        plan = self._predicted(best, reason=f"the best found for {pool.objective.goal}")
        rows = [AlternativeRow(name=in_short(plan), plan=plan, chosen=True, note="chosen")]
        for own in pool.runners_up:
            other = self._predicted(own)
            rows.append(AlternativeRow(name=in_short(other), plan=other, note=why_more(own, best, pool.objective)))
        words = step_in_words(pool), host_exchange_in_words(fleet, best.plan), unjoined_in_words(fleet, best.plan)
        return FleetResult(
            plan=plan,
            alternatives=tuple(rows),
            words=tuple(filter(None, words)),
            timeline=lambda: fleet_timeline(self._predictor, best),
            bound_s=pool.bound_s,
            frontier=tuple(map(self._predicted, pool.frontier)),
            stopped=pool.stopped,
            refused=None if pool.refused is None else self._predicted(pool.refused),
            _pool=pool,
        )

    def _plan(self, plan: TemplatePlan) -> Plan:
        stages = self._predictor.stage_tables
        made = written_plan(plan, self.fleet, stages.expert_width, stages.recomputed)
        return made.model_copy(update={"precision": self.precision})

    def _predicted(self, found: Candidate, reason: str = "") -> Plan:
        own = found.predicted
        prediction = Prediction(
            step_s=own.step_s,
            samples_per_s=own.samples_per_s,
            memory_bytes={"fullest device": round(own.fullest_bytes), "largest": round(own.peak_bytes)},
            memory_share=own.peak_share,
            pipelines_s=own.pipelines_s,
            sync_s=own.sync_s,
            update_s=own.update_s,
            usd_per_hour=own.usd_per_hour,
            usd=own.usd,
            joules=own.joules,
        )
        return self._plan(found.plan).model_copy(update={"reason": reason, "predicted": prediction})

    @cached_property
    def _predictor(self) -> Predictor:
        return self.planner.search(Space()).predictor


def _all_layers(template: Template, number: int) -> tuple[int, ...]:
    stage = template.stages[number]
    return tuple(range(stage.start, stage.stop)) if stage.recompute else ()


def written_plan(
    plan: TemplatePlan,
    fleet: Fleet,
    expert_width: Callable[[Template, int], int] = lambda *_: 0,
    recomputed: Callable[[Template, int], tuple[int, ...]] = _all_layers,
) -> Plan:
    """Micro-batches that are not full belong to the last pipelines; pipelines with the same number of micro-batches are written once.

    ``expert_width``: devices of a stage over which one set of its experts is sharded. ``recomputed``: the layers of a stage that are.
    """
    pipelines = []
    batches = _batches(plan)
    for group in plan.groups:
        own, batches = batches[: group.replicas], batches[group.replicas :]
        stages = tuple(
            _stage(
                stage,
                fleet,
                number % group.template.places if group.template.chunks > 1 else None,
                expert_width(group.template, number),
                recomputed(group.template, number),
            )
            for number, stage in enumerate(group.template.stages)
        )
        pipelines += [
            Pipeline(micro_batches=MicroBatches(sizes), stages=stages, replicas=len(list(alike)))
            for sizes, alike in groupby(own)
        ]
    return Plan(
        global_batch_size=plan.global_batch,
        schedule=plan.schedule,
        zero=cast(Literal[0, 1, 2, 3], plan.zero),
        placement=plan.layout,
        pipelines=tuple(pipelines),
    )


def _stage(stage: TemplateStage, fleet: Fleet, place: int | None, experts: int, recomputed: tuple[int, ...]) -> Stage:
    pool = fleet.pool(stage.pool)
    # What exchanges most is innermost, among the devices that are nearest to each other.
    tensor, context, data = stage.widths
    ways: tuple[tuple[Kind, int], ...] = (("replicate", data), ("context", context), ("split", tensor))
    axes = [Axis(kind=kind, shares=(1,) * width) for kind, width in ways if width > 1] or [Axis(shares=(1,))]
    layout = Layout(kind=axes[0].kind, shares=axes[0].shares, inner=tuple(axes[1:]))
    return Stage(
        blocks=(stage.start, stage.stop),
        group=Group(
            kind=pool.kind,
            devices=stage.devices,
            node=pool.node_name,
            place=place,
            experts=experts if experts > 1 else None,
        ),
        regions=(Region(layout=layout),),
        recompute=recomputed,
    )


def _batches(plan: TemplatePlan) -> list[tuple[int, ...]]:
    """Sizes of the micro-batches of each pipeline. What the groups could hold beyond the global batch is missing from the last ones."""
    found = [
        [group.template.micro_batch] * group.num_microbatches for group in plan.groups for _ in range(group.replicas)
    ]
    over = sum(map(sum, found)) - plan.global_batch
    for sizes in reversed(found):
        while over and sizes:
            less = min(over, sizes[-1])
            over -= less
            sizes[-1] -= less
            if not sizes[-1]:
                sizes.pop()
    return [tuple(sizes) for sizes in found]


def fleet_timeline(predictor: Predictor, candidate: Candidate) -> Timeline:
    """Pipelines as played, then gradient sync, then the update. A rank stands for all that do the same."""
    events: list[Event] = []
    names: list[str] = []
    predicted = candidate.predicted
    for group in candidate.plan.groups:
        first = len(names)
        events += _played(predictor, candidate, group, first)
        for number, home in enumerate(group.template.homes):
            width = f", {home.devices} devices each ({home.widths.in_words})" if home.devices > 1 else ""
            own = ", ".join(map(str, range(number, len(group.template.stages), group.template.places)))
            stages = f"stage{'s' * (group.template.chunks > 1)} {own}"
            names.append(f"{home.pool} {stages} of {group.replicas} pipelines{width}")
    done = predicted.pipelines_s
    for rank in range(len(names)):
        spans = (
            ("REDUCE_GRAD", done, done + predicted.sync_s),
            ("STEP", done + predicted.sync_s, done + predicted.sync_s + predicted.update_s),
        )
        for kind, start, end in spans:
            if end > start:
                lane = "comm" if kind == "REDUCE_GRAD" else "compute"
                events.append(Event(rank=rank, lane=lane, kind=kind, name=kind, step=0, start_s=start, end_s=end))  # type: ignore[arg-type]
    return Timeline.of("simulated", names, events)


def _played(predictor: Predictor, candidate: Candidate, group: TemplateGroup, first: int) -> Iterator[Event]:
    plan = candidate.plan
    makespans = predictor.played(plan.mix, plan.schedule, plan.layout, plan.zero)[group.template]
    reads = [
        Read(source=number, reader=number + 1, forward_s=send_s, backward_s=send_s)
        for number, send_s in enumerate(makespans.sends)
    ]
    schedule = SCHEDULES[plan.schedule]
    orders = schedule.orders(makespans.places, makespans.chunks, group.num_microbatches)
    told = play(orders, makespans.stages, reads=reads)
    for place, (row, starts, ends) in enumerate(zip(orders, told.starts, told.ends, strict=True)):
        for action, start, end in zip(row, starts, ends, strict=True):
            yield Event(
                rank=first + place, lane="compute", kind=action.kind, name=str(action), step=0, start_s=start, end_s=end
            )

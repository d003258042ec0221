"""The interface of the fleet search: its compact plans inside, `Plan` outside.

Such a plan names device kinds and counts, no ids (see `plan.bind`).
"""

from __future__ import annotations

from collections.abc import Callable
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
from heterodyne.plan.short import in_short
from heterodyne.search.fleet.evaluated_plan import EvaluatedPlan
from heterodyne.search.fleet.explain import (
    family_in_words,
    host_exchange_in_words,
    step_in_words,
    unjoined_in_words,
    why_more,
)
from heterodyne.search.fleet.families import best_of_all, outcomes
from heterodyne.search.fleet.objective import Objective
from heterodyne.search.fleet.plan import Template, TemplatePlan, TemplateStage
from heterodyne.search.fleet.planner import FleetPlanner, Planned
from heterodyne.search.fleet.predict import Predictor
from heterodyne.search.fleet.space import Space
from heterodyne.search.fleet.timeline import fleet_timeline
from heterodyne.search.fleet.watch import Watch
from heterodyne.search.result import AlternativeRow, PlanningResult

__all__ = ["FleetResult", "PaperPlanner", "written_plan"]


@dataclass(frozen=True, kw_only=True)
class FleetResult(PlanningResult):
    """The result of a search over device classes. Only this module looks into what the search found."""

    _found: Planned = field(repr=False)


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
        best = min(alone, key=lambda own: objective.score(own._found.best))
        return replace(best, bound_s=found.bound_s, frontier=found.frontier, refused=found.plan)

    def with_families(
        self, result: FleetResult, space: Space, accepts: Callable[[Plan], bool] | None = None
    ) -> FleetResult:
        """With the best plan of each family; the best accepted one of all becomes the plan."""
        found = tuple(outcomes(self.planner, result._found, space))
        takes = None if accepts is None else (lambda plan: accepts(self._plan(plan)))
        best = best_of_all(result._found, found, takes)
        rows = (
            AlternativeRow(
                name=own.family.name,
                plan=None if own.best is None else self._predicted(own.best),
                note=family_in_words(own, best),
            )
            for own in found
        )
        return replace(self._result(best), families=tuple(rows))

    def _result(self, found: Planned) -> FleetResult:
        best = self._predicted(found.best, reason=f"the best found for {found.objective.goal}")
        rows = [AlternativeRow(name=in_short(best), plan=best, chosen=True, note="chosen")]
        for own in found.runners_up:
            plan = self._predicted(own)
            note = why_more(own, found.best, found.objective)
            rows.append(AlternativeRow(name=in_short(plan), plan=plan, note=note))
        words = (
            step_in_words(found),
            host_exchange_in_words(self.fleet, found.best.plan),
            unjoined_in_words(self.fleet, found.best.plan),
        )
        return FleetResult(
            plan=best,
            alternatives=tuple(rows),
            words=tuple(filter(None, words)),
            timeline=lambda: fleet_timeline(self._predictor, found.best),
            bound_s=found.bound_s,
            frontier=tuple(map(self._predicted, found.frontier)),
            stopped=found.stopped,
            refused=None if found.refused is None else self._predicted(found.refused),
            _found=found,
        )

    def _plan(self, plan: TemplatePlan) -> Plan:
        stages = self._predictor.stage_tables
        made = written_plan(plan, self.fleet, stages.expert_width, stages.recomputed)
        return made.model_copy(update={"precision": self.precision})

    def _predicted(self, found: EvaluatedPlan, reason: str = "") -> Plan:
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
    ways: tuple[tuple[Kind, int], ...] = (("replicate", stage.data), ("context", stage.context), ("split", stage.width))
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

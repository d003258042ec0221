"""Plans from the search over device classes (`search.fleet`), on the devices that are here.

It searches stages, tensor and context parallelism and replicas together, however many devices a class has; its plans are bound to
devices, simulated and compared like every other candidate.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from heterodyne.cluster.fleet_cluster import fleet_of
from heterodyne.cost.class_layers import ClassLayers, Way
from heterodyne.cost.model import CostModel
from heterodyne.errors import InfeasibleError, PlanError
from heterodyne.plan.bind import bind
from heterodyne.plan.capabilities import Capabilities
from heterodyne.plan.plan import Pipeline, Plan, Stage
from heterodyne.search.by_speed import shares_by
from heterodyne.search.classes import class_cluster, class_names
from heterodyne.search.fleet.planner import FleetPlanner
from heterodyne.search.fleet.space import Space
from heterodyne.search.fleet.written import PaperPlanner
from heterodyne.search.planned import Candidate, Kind, Strategy, serves
from heterodyne.search.predict import plan_of, with_stages
from heterodyne.search.split import Split
from heterodyne.search.state_sharding import StateSharding

__all__ = ["ByClass"]

_MOST = 3
"""Plans that are simulated."""


@dataclass(frozen=True, kw_only=True)
class ByClass:
    """``split``: builds and evaluates sharded stages; ``able``: what runs for the model; ``strategy``: what is asked for;
    ``sharding``: shards the optimizer state of plans that fit only so; None: nothing does.
    """

    split: Split
    able: Capabilities
    strategy: Strategy = "auto"
    sharding: StateSharding | None = None

    def candidates(self) -> tuple[Candidate, ...]:
        """The fastest that it finds, simulated."""
        weighed = [self._weighed(plan) for plan in self.plans]
        possible = [candidate for candidate in weighed if candidate.step_s is not None]
        possible += [turns for candidate in possible for turns in self.split.overlapped(candidate)]
        return (min(possible, key=lambda c: c.weighed_s),) if possible else tuple(weighed[:1])

    @cached_property
    def plans(self) -> tuple[Plan, ...]:
        """The fastest by the search that serve, best first; none where pipelines must be alike, which it does not know of."""
        if not self.able.allow("unlike_pipelines", "unequal_counts"):
            return ()
        names = class_names(self._model)
        cluster = class_cluster(self._model, names)
        fleet = fleet_of(cluster)
        planner = PaperPlanner(
            planner=FleetPlanner(fleet=fleet, costs=self._layers(names), global_batch=self.split.samples)
        )

        def accepts(plan: Plan) -> bool:
            return serves(_kind(plan), self.strategy)

        try:
            found = planner.plan(space=self._space(), accepts=accepts)
        except InfeasibleError:
            return ()  # what each device lacks is said of the other candidates
        bound = []
        for plan in filter(accepts, (row.plan for row in found.alternatives if row.plan is not None)):
            try:
                made = bind(plan.model_copy(update={"predicted": None}), self._model.graph, cluster)
            except PlanError:
                continue  # whole nodes of unlike sizes: counts alone do not say whether they can be filled
            # A batch may be too small for a sample for every one of alike pipelines.
            pipelines = tuple(pipeline for pipeline in made.pipelines if pipeline.micro_batches.samples)
            bound.append(made.model_copy(update={"pipelines": pipelines}))
        return tuple(bound[:_MOST])

    @property
    def _model(self) -> CostModel:
        return self.split.model

    def _space(self) -> Space:
        allowed = self.able.allow
        return Space(
            max_stages=Space().max_stages if allowed("several_stages") else 1,
            recompute=allowed("recompute"),
            schedules=Space().schedules if allowed("split_backward") else ("1F1B", "GPipe", "Interleaved1F1B"),
            micro_batches=self.split.sizes,
        ).that_runs()

    def _layers(self, names: dict[str, str]) -> ClassLayers:
        members: dict[str, list[str]] = {}
        for device, name in names.items():
            members.setdefault(name, []).append(device)
        ways: list[Way] = ["split"] if self.able.allow("tensor_parallel") else []
        ways += ["context"] if self.able.allow("context_parallel") else []
        sizes = {name: self._largest(own[0]) for name, own in members.items()}
        whole = frozenset(name for name, own in members.items() if own[0] in self.split.runs)
        return ClassLayers(model=self._model, members=members, largest=sizes, stage=self._whole, ways=ways, whole=whole)

    def _largest(self, device: str) -> int:
        return max(map(int, self._model.compute[device].forward.total.sizes))

    def _whole(self, devices: Sequence[str], way: Way) -> Stage:
        return self.split.stage((0, len(self._model.graph.ops)), devices, way, shares_by([1.0] * len(devices)))

    def _weighed(self, plan: Plan) -> Candidate:
        pipelines = tuple(self._priced(pipeline) for pipeline in plan.pipelines)
        found = self.split.weighed(_name(plan), _kind(plan), pipelines, schedule=plan.schedule)
        if found.plan is not None or self.sharding is None:
            return found
        whole = plan_of(self._model, self.split.samples, pipelines, plan.schedule)
        sharded = self.sharding.sharded(replace(found, plan=whole))
        return found if sharded.plan is None else sharded

    def _priced(self, pipeline: Pipeline) -> Pipeline:
        """With what sending is worth beside computing, which says how tensors lie."""

        def changed(_: int, stage: Stage) -> Stage:
            price = self.split.exchange(stage.rows[0]) if stage.sharded else stage.exchange
            return stage.model_copy(update={"exchange": price})

        return with_stages(pipeline, changed)


def _kind(plan: Plan) -> Kind:
    kinds = {axis.kind for p in plan.pipelines for s in p.stages if s.sharded for axis in s.layout.axes}
    if "split" in kinds:
        return "split"
    if "context" in kinds:
        return "context"
    stages = max(len(pipeline.stages) for pipeline in plan.pipelines)
    count = sum(pipeline.replicas for pipeline in plan.pipelines)
    return "balanced" if stages == 1 else "pipeline" if count == 1 else "replicas"


def _name(plan: Plan) -> str:
    """``2 pipelines of 2 stages, weights split over 4 devices, with ZBH1``."""
    stages = [stage for pipeline in plan.pipelines for stage in pipeline.stages]
    widest = max(stages, key=lambda stage: len(stage.rows[0]))
    deep = max(len(pipeline.stages) for pipeline in plan.pipelines)
    told = [f"{len(plan.pipelines)} pipelines" if len(plan.pipelines) > 1 else "one pipeline"]
    told[0] += f" of up to {deep} stages" if deep > 1 else ""
    if widest.sharded:
        what = "sequences" if widest.layout.axes[-1].kind == "context" else "weights"
        told.append(f"{what} split over {len(widest.rows[0])} devices")
    if any(stage.recompute for stage in stages):
        told.append("with recompute")
    if deep > 1:
        told.append(f"with {plan.schedule}")
    return ", ".join(told)

"""Plans from the search over device classes (`search.fleet`), on the devices that are here.

It searches stages, tensor and context parallelism and replicas together, however many devices a class has; its plans are bound to
devices, simulated and compared like every other candidate.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from math import inf

from heterodyne.cluster.fleet_cluster import fleet_of
from heterodyne.cost.class_times import ClassTimes
from heterodyne.cost.graph_layers import GraphLayers
from heterodyne.cost.layers import Way
from heterodyne.cost.model import CostModel
from heterodyne.errors import InfeasibleError, PlanError
from heterodyne.job import Strategy
from heterodyne.plan.bind import bind
from heterodyne.plan.capabilities import Capabilities
from heterodyne.plan.plan import Pipeline, Plan, Stage
from heterodyne.search.by_speed import shares_by
from heterodyne.search.classes import class_cluster, class_names
from heterodyne.search.dispatch import with_cheaper_dispatch
from heterodyne.search.fleet.objective import Objective
from heterodyne.search.fleet.planner import FleetPlanner
from heterodyne.search.fleet.space import Space
from heterodyne.search.fleet.written import PaperPlanner
from heterodyne.search.planned import CUTTING_PAYS, STATE_ELSEWHERE_PAYS, Candidate, Kind, serves
from heterodyne.search.predict import plan_of, predict, with_stages
from heterodyne.search.refine import Refiner
from heterodyne.search.relief import reloading
from heterodyne.search.sharding import Sharding
from heterodyne.search.split import Split

__all__ = ["ByClass"]

_MOST = 3
"""Plans that are simulated."""
_MOST_PLAYED = 4
"""Orders of one plan that are simulated."""
_LEANS, _HALVINGS = 2.0, 4
"""Times its memory, up to which a device may be thought to be filled where the simulation decides; the least of it is bisected."""


@dataclass(frozen=True, kw_only=True)
class ByClass:
    """``split``: builds and evaluates sharded stages; ``able``: what runs for the model; ``strategy``: what is asked for;
    ``sharding``: shards the optimizer state of plans that fit only so; None: nothing does.
    """

    split: Split
    able: Capabilities
    strategy: Strategy = "auto"
    sharding: Sharding | None = None

    def candidates(self, below_s: float = inf) -> tuple[Candidate, ...]:
        """Simulated: the fastest as the class search finds them, the fastest of those that are refined, and an even cut.

        ``below_s``: what a plan has to be weighed below to be worth refining.
        """
        plans, why_not = self._planned(self._space(), self.split.samples)
        weighed = [self._weighed(plan) for plan in plans]
        possible = [candidate for candidate in weighed if candidate.plan is not None]
        lacking = [plan for plan, candidate in zip(plans, weighed, strict=True) if candidate.plan is None]
        possible += self._sharded(lacking, min([below_s, *(c.weighed_s for c in possible)]))
        possible += [turns for candidate in possible for turns in self.split.overlapped(candidate)]
        found = [min(possible, key=lambda c: c.weighed_s)] if possible else weighed[:1]
        refined = self._refined(plans, min([below_s, *(c.weighed_s for c in found)]))
        if below_s == inf and not any(c.plan is not None for c in (*found, *refined)):
            refined = self._lean()
        found += [min(refined, key=lambda c: c.weighed_s)] if refined else []
        if not self._cuts or self.strategy not in ("auto", "pipeline"):
            return tuple(found)
        if not found:
            found = [Candidate(name="a pipeline", kind="pipeline", why_not=why_not)]
        return (*found, self._even(found))

    def _refined(self, plans: Sequence[Plan], below_s: float) -> list[Candidate]:
        """Those that may be weighed below so many seconds, or below what is best of them by then."""
        found: list[Candidate] = []
        for plan in plans:
            if self._least_s(plan) / CUTTING_PAYS < below_s:
                for schedule, pipelines in islice(self._refiner.plans(plan), _MOST_PLAYED):
                    found.append(self._played(pipelines, schedule))
                    below_s = min(below_s, found[-1].weighed_s)
        best = min(found, key=lambda c: c.weighed_s, default=None)
        return found if best is None else [*found, *self._reloaded(best)]

    def _least_s(self, plan: Plan) -> float:
        """Seconds of a step in which no device of a pipeline ever waits."""
        rate = {d.id: self._model.compute[d.id].rate(self.split.sizes) for d in self._model.cluster.devices}
        return max(
            pipeline.micro_batches.samples / sum(rate[device] for devices in pipeline.places for device in devices)
            for pipeline in plan.pipelines
        )

    def _reloaded(self, best: Candidate) -> Iterator[Candidate]:
        """The same with activations that come back from hosts ahead of their backwards; they need room as long, so not all fit."""
        if best.plan is not None and len(best.plan.pipelines) == 1:
            for pipeline in reloading(best.plan.pipelines[0]):
                yield self._played((pipeline,), best.plan.schedule)

    def _lean(self) -> list[Candidate]:
        """Where nothing fits: of pipelines with one micro-batch at a time those that take the least part of each device's memory.

        What is estimated of memory leans upwards, so more is allowed, and the simulation decides.
        """
        found: list[Candidate] = []
        for size in self.split.sizes:
            space = replace(self._space(), max_pipelines=1, micro_batches=(size,), schedules=("1F1B",))
            low, high = 1.0, _LEANS
            plans = self._planned(space, size, memory=high)[0]
            for _ in range(_HALVINGS if plans else 0):
                middle = (low + high) / 2
                fewer = self._planned(space, size, memory=middle)[0]
                low, high, plans = (low, middle, fewer) if fewer else (middle, high, plans)
            fullest = self._planned(space, size, Objective(goal="memory"), memory=_LEANS)[0]
            for plan in (*plans, *fullest):
                for schedule, pipelines in islice(self._refiner.plans(plan), _MOST_PLAYED):
                    found.append(self._played(pipelines, schedule))
                found += [self._played((self._refiner.leanest(p),), "1F1B") for p in plan.pipelines]
        return found

    def _even(self, found: Sequence[Candidate]) -> Candidate:
        """As many blocks for each device, in the usual order and the micro-batches of what is best: as where nothing is known."""
        best = min(found, key=lambda c: c.weighed_s).plan
        size = self.split.sizes[0] if best is None else max(max(p.micro_batches.sizes) for p in best.pipelines)
        micro_batches = self.split.micro_batches(self.split.samples, size)
        pipeline = self._refiner.cuts.even([device.id for device in self._model.cluster.devices], micro_batches)
        schedule = "1F1B" if self.able.allow("early_backward") else "GPipe"
        return self.split.weighed(f"an even cut with {schedule}", "even", (pipeline,), schedule=schedule, shifts=False)

    def _played(self, pipelines: tuple[Pipeline, ...], schedule: str) -> Candidate:
        plan = plan_of(self._model, self.split.samples, pipelines, schedule)
        return self.split.weighed(_name(plan), _kind(plan), pipelines, schedule=schedule, shifts=False)

    def _planned(
        self, space: Space, samples: int, objective: Objective | None = None, *, memory: float = 1.0
    ) -> tuple[tuple[Plan, ...], str]:
        """The best by the search that serve, bound to devices, best first; and why there are none.

        ``samples``: that are in the pipelines at a time. ``memory``: times that of the devices.
        """
        names = class_names(self._model)
        cluster = class_cluster(self._model, names)
        # What is left for tensors: the search counts nothing else.
        usable = (max(1, int(memory * self._model.device_memory[d.id].usable_bytes)) for d in cluster.devices)
        devices = tuple(replace(d, memory_bytes=own) for d, own in zip(cluster.devices, usable, strict=True))
        planner = PaperPlanner(
            planner=FleetPlanner(
                fleet=fleet_of(replace(cluster, devices=devices)), costs=self._layers(names), global_batch=samples
            )
        )

        def accepts(plan: Plan) -> bool:
            return serves(_kind(plan), self.strategy)

        try:
            found = planner.plan(objective, space=space, accepts=accepts)
        except InfeasibleError as error:
            return (), str(error)
        bound = []
        for plan in filter(accepts, (row.plan for row in found.alternatives if row.plan is not None)):
            try:
                made = bind(plan.model_copy(update={"predicted": None}), self._model.graph, cluster)
            except PlanError:
                continue  # whole nodes of unlike sizes: counts alone do not say whether they can be filled
            # A batch may be too small for a sample for every one of alike pipelines.
            pipelines = tuple(pipeline for pipeline in made.pipelines if pipeline.micro_batches.samples)
            if space.max_pipelines == 1:
                pipelines = tuple(map(self._with_all_samples, pipelines))
            bound.append(made.model_copy(update={"pipelines": pipelines}))
        return tuple(bound[:_MOST]), "no pipeline that it finds can be bound to the devices"

    def _with_all_samples(self, pipeline: Pipeline) -> Pipeline:
        """The only pipeline of a plan, which may be for fewer of them, or for another number of micro-batches."""
        micro_batches = self.split.micro_batches(self.split.samples, max(pipeline.micro_batches.sizes))
        return pipeline.model_copy(update={"micro_batches": micro_batches})

    @cached_property
    def _refiner(self) -> Refiner:
        return Refiner(model=self._model)

    @property
    def _model(self) -> CostModel:
        return self.split.model

    @property
    def _cuts(self) -> bool:
        return self.able.allow("several_stages")

    def _space(self) -> Space:
        """Of alike pipelines, where these must be so, there is one, with a given number of micro-batches."""
        allowed, count = self.able.allow, self.split.count
        space = Space(
            max_stages=Space().max_stages if self._cuts else 1,
            recompute=allowed("recompute"),
            schedules=Space().schedules if allowed("split_backward") else ("1F1B", "GPipe", "Interleaved1F1B"),
            micro_batches=self.split.sizes,
        ).that_runs()
        if not allowed("early_backward"):
            space = replace(space, schedules=("GPipe",))
        if count is None:
            return space
        return replace(space, max_pipelines=1, micro_batches=(-(-self.split.samples // count),))

    def _layers(self, names: dict[str, str]) -> GraphLayers:
        members: dict[str, list[str]] = {}
        for device, name in names.items():
            members.setdefault(name, []).append(device)
        ways: list[Way] = ["split"] if self.able.allow("tensor_parallel") else []
        ways += ["context"] if self.able.allow("context_parallel") else []
        sizes = {name: self._largest(own[0]) for name, own in members.items()}
        whole = frozenset(name for name, own in members.items() if own[0] in self.split.runs)
        return GraphLayers(
            ClassTimes(model=self._model, members=members, largest=sizes, stage=self._whole, ways=ways, whole=whole)
        )

    def _largest(self, device: str) -> int:
        return max(map(int, self._model.compute[device].forward.total.sizes))

    def _whole(self, devices: Sequence[str], way: Way) -> Stage:
        return self.split.stage((0, len(self._model.graph.ops)), devices, way, shares_by([1.0] * len(devices)))

    def _weighed(self, plan: Plan) -> Candidate:
        pipelines = tuple(self._priced(pipeline) for pipeline in plan.pipelines)
        return self.split.weighed(_name(plan), _kind(plan), pipelines, schedule=plan.schedule)

    def _sharded(self, plans: Sequence[Plan], below_s: float) -> list[Candidate]:
        """Plans with several pipelines whose optimizer state is sharded, where they would be weighed below so many seconds."""
        found: list[Candidate] = []
        for plan in plans if self.sharding is not None else ():
            pipelines = tuple(with_cheaper_dispatch(self._model, self._priced(pipeline)) for pipeline in plan.pipelines)
            whole = plan_of(self._model, self.split.samples, pipelines, plan.schedule)
            if len(pipelines) > 1 and self.sharding is not None:
                made, played = predict(self._model, whole, self.split.runs)
                named = Candidate(name=_name(plan), kind=_kind(plan), plan=made, simulation=played)
                if named.weighed_s / STATE_ELSEWHERE_PAYS < below_s:
                    found.append(self.sharding.of_state(named))
        return [candidate for candidate in found if candidate.plan is not None]

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
        told.append("with an order of its own" if any(p.order for p in plan.pipelines) else f"with {plan.schedule}")
    return ", ".join(told)

"""Pipelines that no search has made: cut in proportion to speeds, in a named order or the best that is found for their costs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

from heterodyne.cluster.spec import Cluster
from heterodyne.cost.model import CostModel
from heterodyne.cost.recipe import Recipe
from heterodyne.graph.cut import crossings
from heterodyne.graph.ir import ModelGraph
from heterodyne.plan.lower import Lowered, lower
from heterodyne.plan.micro_batches import MicroBatches
from heterodyne.plan.plan import Layout, Pipeline, Plan, Region, Stage
from heterodyne.plan.schedules.best import best_orders
from heterodyne.plan.schedules.times import StageTimes
from heterodyne.sim.run import Simulation, simulate

if TYPE_CHECKING:
    from torch import Tensor, nn

    from heterodyne.api.session import Session
    from heterodyne.api.settings import Prepared, Settings
    from heterodyne.cluster.profile import Profile
    from heterodyne.frontend import Captured
    from heterodyne.job import Strategy
    from heterodyne.measure.whole_model import WholeModel
    from heterodyne.runtime.worker import Worker

__all__ = ["Line", "Rig", "cuts_at", "plan_of", "with_best_order"]

Devices = tuple[str, ...]
_BRIEF_S = 3.0


@dataclass(frozen=True, kw_only=True)
class Line:
    """A pipeline to be: the ``homes`` of its stages, the parts of the work (ratios) that they take, and its micro-batches.

    ``shares``: of the devices of a home, by home, where they are several; ``recompute``: the stages that recompute all their blocks.
    """

    homes: tuple[Devices, ...]
    parts: tuple[float, ...]
    micro_batches: tuple[int, ...]
    shares: tuple[tuple[int, ...], ...] = ()
    recompute: tuple[int, ...] = ()


def cuts_at(graph: ModelGraph, parts: Sequence[float], *, blocks_only: bool = False) -> list[int]:
    """The last op (exclusive) of each stage, so that the stages have these parts of the FLOPs, as nearly as can be.

    Only places are taken at which as little crosses as anywhere (in a chain of blocks, one tensor), or, with ``blocks_only``, where a
    block begins.
    """
    done, total = [0.0], 0.0
    for op in graph.ops:
        total += op.flops_forward(1)
        done.append(total)
    starts = [block.start for block in graph.blocks[1:]]
    if not blocks_only:
        crossing = {p: sum(c.bytes(1) for c in crossings(graph, [0, p])) for p in range(1, len(graph.ops))}
        least = min(crossing[start] for start in starts)
        starts = [p for p, size in crossing.items() if starts[0] <= p <= starts[-1] and size <= least]
    found: list[int] = []
    reached = 0.0
    for number, part in enumerate(parts[:-1]):
        reached += part / sum(parts)
        left = len(parts) - 2 - number  # as many places must be left behind this one
        free = [p for p in starts if not found or p > found[-1]]
        free = free[: len(free) - left]
        found.append(min(free, key=lambda p: abs(done[p] - reached * total)))
    return [*found, len(graph.ops)]


def plan_of(
    graph: ModelGraph, cluster: Cluster, lines: Sequence[Line], schedule: str, *, blocks_only: bool = False
) -> Plan:
    """The plan of these pipelines; what is on none of them is idle."""
    pipelines = []
    for line in lines:
        stages, start = [], 0
        shares = line.shares or tuple((1,) * len(home) for home in line.homes)
        for number, stop in enumerate(cuts_at(graph, line.parts, blocks_only=blocks_only)):
            whole = tuple(n for n, b in enumerate(graph.blocks) if start <= b.start < b.stop <= stop)
            stages.append(
                Stage(
                    ops=(start, stop),
                    devices=line.homes[number],
                    regions=(Region(layout=Layout(shares=shares[number])),),
                    recompute=whole if number in line.recompute else (),
                )
            )
            start = stop
        pipelines.append(Pipeline(micro_batches=MicroBatches(line.micro_batches), stages=tuple(stages)))
    used = {device for line in lines for home in line.homes for device in home}
    return Plan(
        model=graph.fingerprint,
        cluster=cluster.fingerprint,
        global_batch_size=sum(sum(line.micro_batches) for line in lines),
        schedule=schedule,
        pipelines=tuple(pipelines),
        idle=tuple(device.id for device in cluster.devices if device.id not in used),
    )


def with_best_order(plan: Plan, costs: CostModel) -> Plan:
    """The plan with the best orders that are found for the costs of its stages; of a home the slowest device counts."""
    ranks = costs.of(plan).ranks
    pipelines = []
    for pipeline in plan.pipelines:
        times = []
        for number, stage in enumerate(pipeline.stages):
            own = [ranks[costs.cluster.rank(device)].stages[number] for device in stage.devices]
            forward, backward = (
                max(_mean(s) for s in of) for of in zip(*((s.forward_s, s.backward_s) for s in own), strict=True)
            )
            inputs = max(_mean(s.input_s) for s in own) or backward / 2
            weights = max(_mean(s.weight_s) for s in own) or backward / 2
            again = max(_mean(s.recompute_s) for s in own)
            times.append(StageTimes(forward_s=forward, input_s=inputs, weight_s=weights, recompute_s=again))
        orders = best_orders(times, pipeline.place_of_stage, len(pipeline.micro_batches)).orders
        lines = tuple(" ".join(map(str, row)) for row in orders)
        pipelines.append(pipeline.model_copy(update={"order": lines}))
    return plan.model_copy(update={"pipelines": tuple(pipelines)})


@dataclass(frozen=True, kw_only=True)
class Rig:
    """A session in which a model is captured and measured, ready for any plan. Every rank has one."""

    session: Session
    captured: Captured
    whole: WholeModel
    profile: Profile
    settings: Settings

    @classmethod
    def of(
        cls,
        session: Session,
        model: nn.Module,
        batch: Mapping[str, Tensor],
        sizes: tuple[int, ...],
        budget_s: float,
        *,
        captured_then: Callable[[], object] = lambda: None,
    ) -> Rig:
        """Capture and measure; ``sizes``: of micro-batches; ``captured_then``: is done in between. Collective."""
        from heterodyne.api.measuring import measure_everywhere

        captured, whole, settings = _captured(session, model, batch, sizes, "pipeline", budget_s)
        captured_then()
        profile = measure_everywhere(session, captured, whole, settings, fresh=True)
        return cls(session=session, captured=captured, whole=whole, profile=profile, settings=settings)

    @classmethod
    def automatic(
        cls,
        session: Session,
        model: nn.Module,
        batch: Mapping[str, Tensor],
        sizes: tuple[int, ...],
        *,
        budget_s: float = 60.0,
        room: Sequence[float] = (),
    ) -> tuple[Rig, Prepared]:
        """Capture, measure, plan, try and rehearse as in any job. Collective.

        ``room``: what part of the whole model each device may hold beside the framework (`limited`); none: as much as it has.
        """
        from heterodyne.api.preparation import prepare

        captured, whole, settings = _captured(session, model, batch, sizes, "auto", budget_s)
        if room:
            session = limited(session, captured, whole, settings, room)
        prepared = prepare(session, captured, whole, settings)
        rig = cls(session=session, captured=captured, whole=whole, profile=prepared.profile, settings=settings)
        return rig, prepared

    @cached_property
    def costs(self) -> CostModel:
        return CostModel(
            graph=self.captured.graph, cluster=self.session.cluster, profile=self.profile, recipe=Recipe(clip=False)
        )

    def planned(self) -> tuple[Rig, Plan]:
        """The pipeline that the planner chooses, tried as in any job; and the rig as it knows the devices then. Collective."""
        from heterodyne.api.preparation import prepare

        prepared = prepare(self.session, self.captured, self.whole, self.settings)
        return replace(self, profile=prepared.profile), prepared.lowered.plan

    def agreed(self, plan: Plan) -> Plan:
        """The plan of rank 0, on every rank. Collective."""
        return Plan.parse(self.session.communicator.broadcast_object(plan.dump(), 0))

    def lowered(self, plan: Plan) -> Lowered:
        return lower(plan, self.captured.graph, self.session.cluster, clip=False)

    def predicted(self, plan: Plan) -> Simulation:
        return simulate(self.lowered(plan).program, self.costs.of(plan))

    def worker(self, plan: Plan, model: nn.Module) -> Worker:
        """Collective."""
        from heterodyne.api.rank_worker import make_worker
        from heterodyne.api.settings import Prepared

        prepared = Prepared(captured=self.captured, profile=self.profile, lowered=self.lowered(plan), planned=None)
        return make_worker(
            self.session,
            prepared,
            model,
            optimizer=self.settings.optimizer,
            total_steps=10**6,
            seed=0,
            clip_grad_norm=0.0,
        )


def limited(
    session: Session, captured: Captured, whole: WholeModel, settings: Settings, room: Sequence[float]
) -> Session:
    """The session on devices with less memory: beside the framework, that part of what training the whole model takes with micro-batches
    of one sample. Collective."""
    from heterodyne.api.measuring import measure_everywhere

    brief = replace(settings, parallelism=settings.parallelism.model_copy(update={"measure_s": _BRIEF_S}))
    profile = measure_everywhere(session, captured, whole, brief, fresh=True)  # what the framework takes
    costs = CostModel(graph=captured.graph, cluster=session.cluster, profile=profile, recipe=Recipe(clip=False))
    devices = []
    for part, device in zip(room, session.cluster.devices, strict=True):
        use = costs.memory_use(device.id, 1)
        devices.append(replace(device, memory_bytes=round(use.context + part * (use.total - use.context))))
    return replace(session, cluster=replace(session.cluster, devices=tuple(devices)))


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def _captured(
    session: Session,
    model: nn.Module,
    batch: Mapping[str, Tensor],
    sizes: tuple[int, ...],
    strategy: Strategy,
    budget_s: float = 60.0,
) -> tuple[Captured, WholeModel, Settings]:
    from heterodyne.api.as_it_is import AsItIs
    from heterodyne.api.capturing import capture_everywhere
    from heterodyne.api.model_source import copies_of
    from heterodyne.api.settings import Settings
    from heterodyne.frontend import Captured, loss_of
    from heterodyne.job import OptimizerSection, ParallelismSection
    from heterodyne.measure.whole_model import WholeModel

    settings = Settings(
        global_batch_size=len(next(iter(batch.values()))),
        precision="fp32",
        optimizer=OptimizerSection(lr=1e-4),
        parallelism=ParallelismSection(
            micro_batch_sizes=sizes, strategy=strategy, measure_s=budget_s, rehearsal_s=budget_s / 2
        ),
    )
    build = copies_of(model)
    captured = capture_everywhere(session, model, batch, AsItIs(build=build))
    assert isinstance(captured, Captured)
    whole = WholeModel(
        build=build,
        inputs=captured.graph.inputs,
        example=batch,
        loss=loss_of,
    )
    return captured, whole, settings

"""What a search over classes of devices has found, written as a `Plan`: kinds and counts, no ids (see `plan.bind`)."""

from __future__ import annotations

from itertools import groupby
from typing import Literal, cast

from heterodyne.cluster.fleet import Fleet
from heterodyne.plan.mesh import Kind
from heterodyne.plan.micro_batches import MicroBatches
from heterodyne.plan.plan import Axis, Group, Layout, Pipeline, Plan, Prediction, Region, Stage
from heterodyne.plan.precision import Precisions
from heterodyne.search.fleet.plan import FleetPlan
from heterodyne.search.fleet.plan import Stage as FleetStage
from heterodyne.search.fleet.weighed import Weighed

__all__ = ["written", "written_plan"]


def written(found: Weighed, fleet: Fleet, *, precision: Precisions = "fp32", reason: str = "") -> Plan:
    """With what is predicted of it."""
    own = found.predicted
    return written_plan(found.plan, fleet).model_copy(
        update={
            "precision": precision,
            "reason": reason,
            "predicted": Prediction(
                step_s=own.step_s,
                samples_per_s=own.samples_per_s,
                memory_bytes={"fullest device": round(own.fullest_bytes)},
            ),
        }
    )


def written_plan(plan: FleetPlan, fleet: Fleet) -> Plan:
    """Micro-batches that are not full are those of the last pipelines; pipelines of as many are written once."""
    pipelines = []
    batches = _batches(plan)
    for group in plan.groups:
        own, batches = batches[: group.replicas], batches[group.replicas :]
        stages = tuple(
            _stage(stage, fleet, number % group.template.places if group.template.chunks > 1 else None)
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


def _stage(stage: FleetStage, fleet: Fleet, place: int | None) -> Stage:
    pool = fleet.pool(stage.pool)
    # What exchanges most is innermost, among the devices that are nearest to each other.
    ways: tuple[tuple[Kind, int], ...] = (("replicate", stage.data), ("context", stage.context), ("split", stage.width))
    axes = [Axis(kind=kind, shares=(1,) * width) for kind, width in ways if width > 1] or [Axis(shares=(1,))]
    layout = Layout(kind=axes[0].kind, shares=axes[0].shares, inner=tuple(axes[1:]))
    return Stage(
        blocks=(stage.start, stage.stop),
        group=Group(kind=pool.kind, devices=stage.devices, node=pool.node_name, place=place),
        regions=(Region(layout=layout),),
        recompute=tuple(range(stage.start, stage.stop)) if stage.recompute else (),
    )


def _batches(plan: FleetPlan) -> list[tuple[int, ...]]:
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

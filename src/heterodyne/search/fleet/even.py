"""A plan over a fleet as an even one, that other frameworks can run: one kind of device, replicas that are alike, one width."""

from __future__ import annotations

from typing import Literal

from heterodyne.cluster.fleet import Fleet
from heterodyne.errors import PlanError
from heterodyne.plan.export import EvenPlan, ModelShape, Precision
from heterodyne.search.fleet.plan import FleetPlan

__all__ = ["even_fleet_plan"]

_STAGES: tuple[Literal[0, 1, 2, 3], ...] = (0, 1, 2, 3)


def even_fleet_plan(
    plan: FleetPlan,
    fleet: Fleet,
    *,
    ends: tuple[int, int] = (1, 1),
    precision: Precision = "bf16",
    expert_width: int = 0,
    shape: ModelShape | None = None,
) -> EvenPlan:
    """The same plan in the words of other frameworks.

    Args:
        ends: how many of the first and last layers are the embedding and the head, which those do not count.
        expert_width: devices of a stage over which one set of the experts lies; 0: there are none.

    Raises PlanError with what is not even, and what would be.
    """
    kinds = {fleet.pool(stage.pool).kind for group in plan.groups for stage in group.template.stages}
    if len(kinds) > 1:
        raise PlanError(f"other frameworks know one kind of device, and the plan has {', '.join(sorted(kinds))}")
    widths = {stage.widths for group in plan.groups for stage in group.template.stages}
    if len(widths) > 1:
        told = ", ".join(own.in_words or "1" for own in sorted(widths))
        raise PlanError(f"its stages have widths {told}, and other frameworks have one")
    shapes = {
        (
            group.template.micro_batch,
            group.template.chunks,
            tuple((s.start, s.stop, s.recompute) for s in group.template.stages),
        )
        for group in plan.groups
    }
    if len(shapes) > 1:
        raise PlanError(f"it has {len(shapes)} kinds of pipelines, and other frameworks have one")
    counts = {group.num_microbatches for group in plan.groups}
    (micro_batch, chunks, stages), width = next(iter(shapes)), next(iter(widths))
    # Devices that share a micro-batch are replicas in other words.
    replicas, micro_batch = plan.pipelines * width.data, micro_batch // width.data
    if len(counts) > 1 or plan.global_batch % (micro_batch * replicas):
        raise PlanError(
            f"{replicas} replicas do not share {plan.global_batch} samples evenly in micro-batches of {micro_batch}; "
            f"a global batch of {micro_batch * replicas * max(counts)} would"
        )
    layers = [stop - start for start, stop, _ in stages]
    layers[0] -= ends[0]
    layers[-1] -= ends[1]
    again = tuple(count if recompute else 0 for count, (_, _, recompute) in zip(layers, stages, strict=True))
    return EvenPlan(
        layers_per_stage=tuple(layers),
        micro_batch_size=micro_batch,
        global_batch_size=plan.global_batch,
        dp=replicas,
        tp=width.tensor,
        cp=width.context,
        ep=max(1, expert_width),
        pp=len(stages) // chunks,
        vpp=chunks,
        zero_stage=_STAGES[plan.zero],
        recomputed_layers=again if any(again) else (),
        schedule=plan.schedule if len(stages) > 1 else "1F1B",
        precision=precision,
        shape=shape or ModelShape(),
    )

"""From a plan that names kinds of devices to an even one, that other frameworks can run: one kind, replicas that are alike, one width."""

from __future__ import annotations

from heterodyne.errors import PlanError
from heterodyne.plan.export.even_plan import EvenPlan, ModelShape, Precision
from heterodyne.plan.plan import Layout, Pipeline, Plan, Stage

__all__ = ["even_plan_of_groups"]


def even_plan_of_groups(
    plan: Plan,
    *,
    precision: Precision = "bf16",
    shape: ModelShape | None = None,
) -> EvenPlan:
    """The same plan in the words of other frameworks.

    Args:
        plan: not bound. Its first and its last block are the embedding and the head, which other frameworks do not count.

    Raises PlanError with what is not even, and what would be.
    """
    stages = [stage for pipeline in plan.pipelines for stage in pipeline.stages]
    kinds = {stage.group.kind for stage in stages if stage.group}
    if len(kinds) != 1:
        raise PlanError(f"other frameworks know one kind of device, and the plan has {', '.join(sorted(kinds))}")
    widths = {_widths(stage.regions[0].layout) for stage in stages}
    if len(widths) > 1:
        told = ", ".join(_in_words(own) for own in sorted(widths))
        raise PlanError(f"its stages have widths {told}, and other frameworks have one")
    if any(not any(pipeline.micro_batches.sizes) for pipeline in plan.pipelines):
        raise PlanError("it has pipelines without samples, which hold state for others; other frameworks have none")
    shapes = {(max(p.micro_batches.sizes), _cut(p)) for p in plan.pipelines}
    if len(shapes) > 1:
        raise PlanError(f"it has {len(shapes)} kinds of pipelines, and other frameworks have one")
    (micro_batch, cut), (data, context, tensor) = next(iter(shapes)), next(iter(widths))
    counts = [len(p.micro_batches) for p in plan.pipelines]
    # Devices that share a micro-batch are replicas in other words.
    replicas = data * sum(pipeline.replicas for pipeline in plan.pipelines)
    micro_batch //= data
    if len(set(counts)) > 1 or plan.global_batch_size != micro_batch * replicas * counts[0]:
        raise PlanError(
            f"{replicas} replicas do not share {plan.global_batch_size} samples evenly in micro-batches of {micro_batch}; "
            f"a global batch of {micro_batch * replicas * max(counts)} would"
        )
    layers = [stop - start for (start, stop), _, _ in cut]
    layers[0] -= 1
    layers[-1] -= 1
    again = tuple(count if recompute else 0 for count, (_, recompute, _) in zip(layers, cut, strict=True))
    places = len({place for _, _, place in cut})
    return EvenPlan(
        layers_per_stage=tuple(layers),
        micro_batch_size=micro_batch,
        global_batch_size=plan.global_batch_size,
        dp=replicas,
        tp=tensor,
        cp=context,
        ep=max((stage.group.experts or 1 for stage in stages if stage.group), default=1),
        pp=places,
        vpp=len(cut) // places,
        zero_stage=plan.zero,
        recomputed_layers=again if any(again) else (),
        schedule=plan.schedule if len(cut) > 1 else "1F1B",
        precision=precision,
        shape=shape or ModelShape(),
    )


def _widths(layout: Layout) -> tuple[int, int, int]:
    """Members of the axes that share samples, sequences and weights."""
    found = {"replicate": 1, "context": 1, "split": 1}
    for axis in layout.axes:
        found[axis.kind] *= len(axis.shares)
    return found["replicate"], found["context"], found["split"]


def _in_words(widths: tuple[int, int, int]) -> str:
    named = zip(("data", "context", "tensor"), widths, strict=True)
    return " x ".join(f"{name} {width}" for name, width in named if width > 1) or "1"


def _cut(pipeline: Pipeline) -> tuple[tuple[tuple[int, int], bool, int], ...]:
    """Of each stage its blocks, whether it recomputes, and its place."""
    return tuple(
        (
            _blocks(stage),
            bool(stage.recompute),
            number if stage.group is None or stage.group.place is None else stage.group.place,
        )
        for number, stage in enumerate(pipeline.stages)
    )


def _blocks(stage: Stage) -> tuple[int, int]:
    if stage.blocks is None:
        raise PlanError("the plan names devices and ops; this export takes one that names kinds and blocks")
    return stage.blocks

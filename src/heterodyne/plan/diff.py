"""What changed from one plan to another, in words."""

from __future__ import annotations

from heterodyne.plan.plan import Pipeline, Plan, Region
from heterodyne.plan.precision import in_words
from heterodyne.units import format_bytes, format_seconds

__all__ = ["differences"]


def differences(before: Plan, after: Plan) -> tuple[str, ...]:
    """One line a difference that changes what runs; none for plans that run alike. Predictions and reasons are not compared,
    except that a new predicted step time is named if anything else differs."""
    lines = [
        f"{what}: {old} -> {new}"
        for what, old, new in (
            ("model", before.model, after.model),
            ("cluster", before.cluster, after.cluster),
            ("global batch", before.global_batch_size, after.global_batch_size),
            ("precision", in_words(before.precision), in_words(after.precision)),
            ("schedule", before.schedule, after.schedule),
            ("buckets", format_bytes(before.bucket_bytes), format_bytes(after.bucket_bytes)),
            ("ZeRO level", before.zero, after.zero),
            ("placement", before.placement, after.placement),
        )
        if old != new
    ]
    lines += _of_pipelines(before, after)
    if lines and before.predicted and after.predicted:
        old_s, new_s = before.predicted.step_s, after.predicted.step_s
        lines.append(f"predicted step: {format_seconds(old_s)} -> {format_seconds(new_s)}")
    return tuple(lines)


def _of_pipelines(before: Plan, after: Plan) -> list[str]:
    """Pipelines are distinguished by the set of their devices, so that a changed order or share shows as such; those of a plan that is not
    bound by their place in it."""
    old = {_key(number, p): p for number, p in enumerate(before.pipelines)}
    new = {_key(number, p): p for number, p in enumerate(after.pipelines)}
    lines = []
    for key, pipeline in old.items():
        if key not in new:
            lines.append(f"{_name(pipeline)}: {_share(pipeline)} -> no share")
        else:
            lines += _of_pipeline(pipeline, new[key])
    lines += [f"{_name(p)}: no share -> {_share(p)}" for key, p in new.items() if key not in old]
    kept = [key for key in old if key in new]
    if kept != [key for key in new if key in old]:
        lines.append("order of the pipelines: " + ", ".join(_name(p) for p in after.pipelines))
    gone, come = set(before.idle) - set(after.idle), set(after.idle) - set(before.idle)
    lines += [f"{device}: no longer idle" for device in before.idle if device in gone]
    lines += [f"{device}: now idle" for device in after.idle if device in come]
    return lines


def _of_pipeline(old: Pipeline, new: Pipeline) -> list[str]:
    lines = []
    if old.micro_batches != new.micro_batches:
        lines.append(f"{_name(new)}: {_share(old)} -> {_share(new)}")
    if old.replicas != new.replicas:
        lines.append(f"{_name(new)}: {old.replicas} replicas -> {new.replicas}")
    if len(old.stages) != len(new.stages):
        return [*lines, f"{_name(new)}: {len(old.stages)} stages -> {len(new.stages)}"]
    for number, (a, b) in enumerate(zip(old.stages, new.stages, strict=True)):
        lines += [
            f"{_name(new)}, stage {number}, {field}: {getattr(a, field)} -> {getattr(b, field)}"
            for field in (
                "blocks",
                "group",
                "ops",
                "devices",
                "recompute",
                "keep",
                "offload_activations",
                "reload_ahead",
                "state_shares",
                "overlap",
                "hierarchical",
                "offload",
                "reshard_after_forward",
            )
            if getattr(a, field) != getattr(b, field)
        ]
        if a.regions != b.regions:
            lines.append(f"{_name(new)}, stage {number}: {_regions(a.regions)} -> {_regions(b.regions)}")
    return lines


def _regions(regions: tuple[Region, ...]) -> str:
    return ", ".join(f"{r.task_graph} {r.layout}" for r in regions) or "no region"


def _devices(pipeline: Pipeline) -> list[str]:
    return [device for stage in pipeline.stages for device in stage.devices]


def _key(number: int, pipeline: Pipeline) -> object:
    return frozenset(_devices(pipeline)) or number


def _name(pipeline: Pipeline) -> str:
    groups = [stage.group for stage in pipeline.stages if stage.group is not None]
    named = _devices(pipeline) or [f"{group.devices} x {group.kind}" for group in groups]
    return " + ".join(named) or "a pipeline without devices"


def _share(pipeline: Pipeline) -> str:
    return f"{pipeline.micro_batches.samples} samples ({pipeline.micro_batches})"

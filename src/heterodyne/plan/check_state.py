"""The rules of plans that shard state over the devices that hold the same weights."""

from __future__ import annotations

from collections.abc import Iterator

from heterodyne.plan.plan import Plan, Stage
from heterodyne.plan.weights import PlannedWeights

__all__ = ["faults_of_mesh", "faults_of_state", "faults_of_state_shards"]


def faults_of_state(plan: Plan) -> Iterator[str]:
    """Yield what is wrong with ``state_shares``, stage by stage."""
    for number, pipeline in enumerate(plan.pipelines):
        for index, stage in enumerate(pipeline.stages):
            where = f"pipeline {number}, stage {index}"
            if stage.state_shares is None:
                continue
            if not plan.zero:
                yield f"{where} has 'state_shares', and every device keeps all of its state: write 'zero': 1, or leave them out"
            if len(stage.state_shares) != len(stage.devices):
                yield (
                    f"{where} has {len(stage.state_shares)} state_shares for {len(stage.devices)} devices: give each device one"
                )
    if plan.zero:
        yield from _faults_of_unlike_shares(plan)


def _faults_of_unlike_shares(plan: Plan) -> Iterator[str]:
    """A device has one share, whichever of its stages is looked at."""
    said: dict[str, dict[int, str]] = {}
    for number, pipeline in enumerate(plan.pipelines):
        for index, stage in enumerate(pipeline.stages):
            shares = stage.state_shares or (1,) * len(stage.devices)
            for device, share in zip(stage.devices, shares, strict=False):
                said.setdefault(device, {}).setdefault(share, f"{share} in pipeline {number}, stage {index}")
    for device, places in said.items():
        if len(places) > 1:
            yield f"device {device!r} has state_shares {' and '.join(places.values())}: give it the same in all of its stages"


def faults_of_state_shards(plan: Plan, weights: PlannedWeights) -> Iterator[str]:
    """Yield what cannot be sharded, of a plan that keeps all other rules."""
    if not plan.zero:
        return
    holdings, buckets = weights.holdings, weights.buckets
    if all(len(bucket.owners) < 2 for bucket in buckets):
        yield (
            f"it shards state over the devices that hold the same weights (ZeRO-{plan.zero}), and no two devices do: leave 'zero' out"
        )
    cut = sorted(
        {p.name for b in buckets for p in b.parts if any(holdings[p.name][owner] != p.box for owner in b.owners)}
    )
    if cut:
        yield (
            f"its pipelines cut {cut[0]!r} in different ways, so that its state cannot be sharded over them: cut them alike, or leave "
            "'zero' out"
        )


def faults_of_mesh(stage: Stage) -> list[str]:
    """Each rule that the axes of a stage break, as the end of a sentence about it."""
    layouts = [region.layout for region in stage.regions]
    if not any(layout.inner for layout in layouts):
        return []
    shown = ", ".join(f"{region.task_graph!r} {region.layout}" for region in stage.regions)
    if len({layout.sizes for layout in layouts}) > 1:
        return [f"has regions on different meshes ({shown}): write each with the same axes, as many members in each"]
    outer = stage.batch_axes
    if len({tuple(axis.shares for axis in layout.axes[:outer]) for layout in layouts}) > 1:
        return [
            f"shares samples over its rows in different ways ({shown}): give the outermost axes the same shares in all regions"
        ]
    return []

"""Plans for one device that has to run a model as several would: in stages, in unequal parts of a batch."""

from __future__ import annotations

from collections.abc import Sequence

from heterodyne.cluster.spec import Cluster
from heterodyne.graph.ir import ModelGraph
from heterodyne.plan.micro_batches import MicroBatches
from heterodyne.plan.plan import Layout, Pipeline, Plan, Region, Stage

__all__ = ["one_device_plan", "places_to_cut"]

_MOST_CUTS = 8


def one_device_plan(graph: ModelGraph, cluster: Cluster, starts: Sequence[int], parts: Sequence[int]) -> Plan:
    """For one device: stages one after the other, one micro-batch at a time."""
    (device,) = cluster.devices
    stages = tuple(
        Stage(ops=(start, stop), devices=(device.id,), regions=(Region(layout=Layout(shares=(1,))),))
        for start, stop in zip(starts, [*starts[1:], len(graph.ops)], strict=True)
    )
    forwards = [[f"{stage}F{index}" for stage in range(len(stages))] for index in range(len(parts))]
    backwards = [[f"{stage}B{index}" for stage in reversed(range(len(stages)))] for index in range(len(parts))]
    order = [action for pair in zip(forwards, backwards, strict=True) for actions in pair for action in actions]
    return Plan(
        model=graph.fingerprint,
        cluster=cluster.fingerprint,
        global_batch_size=sum(parts),
        pipelines=(Pipeline(micro_batches=MicroBatches(tuple(parts)), stages=stages, order=(" ".join(order),)),),
    )


def places_to_cut(graph: ModelGraph) -> list[int]:
    """Return where to try to cut, the border of blocks that is nearest to the middle of the work first."""
    borders = [block.start for block in graph.blocks if block.start] or (
        [len(graph.ops) // 2] if len(graph.ops) > 1 else []
    )
    done = 0.0
    before = {}
    for block in graph.blocks:
        before[block.start] = done
        done += float(graph.flops_forward(block)(1))
    return sorted(borders, key=lambda start: abs(before.get(start, 0.0) - done / 2))[:_MOST_CUTS]

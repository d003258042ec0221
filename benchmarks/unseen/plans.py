"""One plan of each kind for any model: hand-made, unequal wherever it can be."""

from __future__ import annotations

from collections.abc import Sequence

from heterodyne.cluster.spec import Cluster, Device
from heterodyne.graph.cut import crossings
from heterodyne.graph.ir import ModelGraph
from heterodyne.plan.micro_batches import MicroBatches
from heterodyne.plan.plan import Layout, Pipeline, Plan, Region, Stage

__all__ = ["KINDS", "SAMPLES", "cluster_of", "plan_of"]

SAMPLES = 7
KINDS = ("data", "1F1B", "ZBH1", "unlike", "tensor 2", "tensor 3", "context", "mixed")

Part = tuple[float, tuple[int, ...], str]
"""Up to which part of the ops, the shares of its devices, and how they lie on them."""
Line = tuple[tuple[int, ...], tuple[Part, ...]]
"""Sizes of the micro-batches, and the stages."""


def _whole(shares: tuple[int, ...], kind: str) -> tuple[Part, ...]:
    return ((1.0, shares, kind),)


ALONE = _whole((1,), "replicate")
LINES: dict[str, tuple[Line, ...]] = {
    "data": (((3, 1), ALONE), ((2,), ALONE), ((1,), ALONE)),
    "1F1B": (((2, 2, 2, 1), ((0.3, (1,), "replicate"), (0.7, (1,), "replicate"), (1.0, (1,), "replicate"))),),
    "ZBH1": (((3, 2, 2), ((0.45, (1,), "replicate"), (1.0, (1,), "replicate"))),),
    "unlike": (((2, 1, 1), ((0.6, (1,), "replicate"), (1.0, (1,), "replicate"))), ((3,), ALONE)),
    "tensor 2": (((4, 3), _whole((2, 1), "split")),),
    "tensor 3": (((7,), _whole((3, 2, 1), "split")),),
    "context": (((4, 3), _whole((2, 1), "context")),),
    "mixed": (((3, 2), ((0.4, (1,), "replicate"), (1.0, (1, 2), "split"))), ((2,), ALONE)),
}
"""Of each kind of plan its pipelines."""


def cluster_of(kind: str) -> Cluster:
    devices = sum(len(shares) for _, parts in LINES[kind] for _, shares, _ in parts)
    return Cluster(
        name="families",
        devices=tuple(
            Device(id=f"here/cpu:{rank}", kind="cpu", node="here", memory_bytes=2**30, backend="cpu")
            for rank in range(devices)
        ),
    )


def plan_of(kind: str, graph: ModelGraph) -> Plan:
    """For `SAMPLES`. Where the samples of a micro-batch see each other, each pipeline takes all its samples at once: so one device does."""
    cluster = cluster_of(kind)
    together = bool(graph.batch_statistics) or graph.loss.reduction == "coupled"
    pipelines, free = [], [device.id for device in cluster.devices]
    for sizes, parts in LINES[kind]:
        stages, start = [], 0
        for part, shares, layout in parts:
            stop = _stop(graph, part, start)
            devices, free = tuple(free[: len(shares)]), free[len(shares) :]
            region = Region(layout=Layout(kind=layout, shares=shares))  # type: ignore[arg-type]  # one of the three
            again = _blocks(graph, start, stop) if kind == "mixed" else ()
            stages.append(Stage(ops=(start, stop), devices=devices, regions=(region,), recompute=again))
            start = stop
        taken: Sequence[int] = (sum(sizes),) if together else sizes
        pipelines.append(Pipeline(micro_batches=MicroBatches(tuple(taken)), stages=tuple(stages)))
    return Plan(
        model=graph.fingerprint,
        cluster=cluster.fingerprint,
        global_batch_size=SAMPLES,
        schedule="ZBH1" if kind == "ZBH1" else "1F1B",
        bucket_bytes=4096,
        pipelines=tuple(pipelines),
    )


def _stop(graph: ModelGraph, part: float, start: int) -> int:
    """The place nearest to that part of the ops where all that crosses follows the samples, one by one."""
    ops = len(graph.ops)
    if part == 1.0:
        return ops
    wanted = round(part * ops)
    places = sorted(range(start + 1, ops), key=lambda place: abs(place - wanted))
    return next((place for place in places if _is_by_sample(graph, place)), wanted)


def _is_by_sample(graph: ModelGraph, place: int) -> bool:
    for crossing in crossings(graph, [0, place]):
        op = graph.op_by_name[crossing.name]
        for spec, dim, flows in zip(op.outputs, op.samples, op.differentiable, strict=True):
            if dim is None and (flows or not all(size.is_constant for size in spec.shape)):
                return False
    return True


def _blocks(graph: ModelGraph, start: int, stop: int) -> tuple[int, ...]:
    return tuple(n for n, block in enumerate(graph.blocks) if start <= block.start < block.stop <= stop)

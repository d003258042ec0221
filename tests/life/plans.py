"""A plan of each kind for any graph, unequal wherever it can be."""

from __future__ import annotations

from heterodyne.graph.cut import crossings
from heterodyne.graph.ir import ModelGraph
from heterodyne.plan.plan import Plan
from life.script import SAMPLES
from multiprocess.work import PipelineOf, Shares, StageOf, cluster_of, plan_of, staged_plan

__all__ = ["RANKS", "plan_for", "stop_near"]

RANKS = {"data 3": 3, "hybrid": 3, "mixed": 3}
"""Of kinds with another number than two."""
_WHOLE: dict[str, Shares] = {"data": ((2, 2), (2, 1)), "data 3": ((2, 1), (3,), (1,))}
_PARTS: dict[str, tuple[tuple[float, tuple[int, ...]], ...]] = {
    "1F1B": ((0.45, (0,)), (1.0, (1,))),
    "interleaved": ((0.25, (0,)), (0.5, (1,)), (0.75, (0,)), (1.0, (1,))),
    "split": ((1.0, (0, 1)),),
    "hybrid": ((0.4, (0,)), (1.0, (1, 2))),
    "mixed": ((0.55, (0,)), (1.0, (1,))),
}
"""Up to which part of the ops, on which ranks."""
_SIZES = {"1F1B": (3, 2, 2), "interleaved": (2, 2, 2, 1), "split": (4, 3), "hybrid": (4, 3), "mixed": (3, 1)}


def plan_for(kind: str, graph: ModelGraph) -> Plan | str:
    """A Plan, or for ``auto`` that word."""
    if kind == "auto":
        return kind
    cluster = cluster_of(RANKS.get(kind, 2))
    # As one device, which has all samples at once.
    whole = bool(graph.batch_statistics) or graph.loss.reduction == "coupled"
    if kind not in _PARTS:
        shares = _WHOLE.get(kind, _WHOLE["data"])
        zero = {"zero 1": 1, "zero 3": 3}.get(kind, 0)
        return plan_of(graph, cluster, [(sum(sizes or ()),) if whole else sizes for sizes in shares], zero=zero)
    stages: list[StageOf] = []
    for part, ranks in _PARTS[kind]:
        start = stages[-1].stop if stages else 0
        stop = stop_near(graph, part, start)
        split = len(ranks) > 1
        again = tuple(n for n, block in enumerate(graph.blocks) if start <= block.start < block.stop <= stop)
        stages.append(
            StageOf(
                stop,
                ranks,
                (2, 1) if split else (1,),
                kind="split" if split else "replicate",
                free=split,
                recompute=again if kind == "interleaved" else (),
            )
        )
    pipelines = [PipelineOf((sum(_SIZES[kind]),) if whole else _SIZES[kind], tuple(stages))]
    if kind == "mixed":
        rest = (SAMPLES - sum(_SIZES[kind]),)
        pipelines.append(PipelineOf(rest, (StageOf(len(graph.ops), (2,), (1,)),)))
    return staged_plan(
        graph, cluster, pipelines, "Interleaved1F1B" if kind == "interleaved" else "1F1B", bucket_bytes=4096
    )


def stop_near(graph: ModelGraph, part: float, start: int) -> int:
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

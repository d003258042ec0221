"""The same plan for another capture of the same model: one in eval mode, or after a term has joined the loss.

Stages keep their devices, and the ops of the new graph go to the stage of the ops that they stand beside. Nothing moves between devices,
so each stage may only read parameters and buffers that its devices hold already.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Sequence
from difflib import SequenceMatcher
from itertools import pairwise

from heterodyne.errors import PlanError
from heterodyne.graph.ir import ModelGraph
from heterodyne.graph.op import Op
from heterodyne.plan.buckets import Holdings, holdings_of, stages_reading
from heterodyne.plan.plan import Pipeline, Plan, Stage
from heterodyne.plan.weights import PlannedWeights

__all__ = ["realigned"]


def realigned(plan: Plan, weights: PlannedWeights, old: ModelGraph, new: ModelGraph, replaced: Collection[str]) -> Plan:
    """Return ``plan``, which is bound to the graph ``old``, bound to ``new``.

    Args:
        weights: who holds which under the plan.
        replaced: buffers that were put in the place of others; those of other shapes, and new ones, are held whole by every device.

    Raises PlanError if a stage would read a parameter or buffer that its devices do not hold or gather, or a block that is recomputed
    or offloaded has no counterpart.
    """
    if old.fingerprint == new.fingerprint:
        return plan
    at = _Alignment(old, new)
    pipelines = tuple(
        pipeline.model_copy(update={"stages": _stages(pipeline, old, new, at)}) for pipeline in plan.pipelines
    )
    moved = plan.model_copy(update={"model": new.fingerprint, "pipelines": pipelines})
    shapes = {buffer.name: buffer.shape for buffer in old.buffers}
    whole = {b.name for b in new.buffers if b.name in replaced and shapes.get(b.name) != b.shape}
    _require_held(weights.holdings, moved, new, whole)
    if plan.zero > 2:
        _require_gathered(weights, moved, new)
    return moved


def _stages(pipeline: Pipeline, old: ModelGraph, new: ModelGraph, at: _Alignment) -> tuple[Stage, ...]:
    starts = [stage.ops[0] for stage in pipeline.stages]
    bounds = [0, *at.boundaries(starts[1:]), len(new.ops)]
    if any(first >= stop for first, stop in pairwise(bounds)):
        raise PlanError(f"a stage of the plan would have no op left of {new.name}")
    return tuple(
        stage.model_copy(
            update={
                "ops": (bounds[number], bounds[number + 1]),
                "recompute": _blocks(stage.recompute, old, new),
                "offload_activations": _blocks(stage.offload_activations, old, new),
            }
        )
        for number, stage in enumerate(pipeline.stages)
    )


def _blocks(indices: Sequence[int], old: ModelGraph, new: ModelGraph) -> tuple[int, ...]:
    by_name = {block.name: block.index for block in new.blocks}
    names = [old.blocks[index].name for index in indices]
    missing = [name for name in names if name not in by_name]
    if missing:
        raise PlanError(
            f"the block {missing[0]!r}, which the plan recomputes or offloads, is no block of {new.name} now"
        )
    return tuple(by_name[name] for name in names)


class _Alignment:
    """Which ops of two graphs correspond: a longest matching of their operators, modules and parameters."""

    def __init__(self, old: ModelGraph, new: ModelGraph) -> None:
        self._new = new
        first, second = ([_key(op) for op in graph.ops] for graph in (old, new))
        blocks = SequenceMatcher(None, first, second, autojunk=False).get_matching_blocks()
        self._pairs = [(block.a + i, block.b + i) for block in blocks for i in range(block.size)]
        self._old_places = [pair[0] for pair in self._pairs]

    def boundaries(self, starts: Sequence[int]) -> list[int]:
        """Return for the first op of each stage but the first where that stage begins in the new graph."""
        return [self._boundary(start) for start in starts]

    def _boundary(self, start: int) -> int:
        """Ops that only the new graph has go to the earlier stage, up to the first one that reads a parameter of the later one."""
        place = bisect_left(self._old_places, start)
        low = self._pairs[place - 1][1] + 1 if place else 0
        high = self._pairs[place][1] if place < len(self._pairs) else len(self._new.ops)
        later = {name for _, after in self._pairs[place:] for name in self._new.ops[after].parameters}
        earlier = {name for _, before in self._pairs[:place] for name in self._new.ops[before].parameters}
        for index in range(low, high):
            if set(self._new.ops[index].parameters) & (later - earlier):
                return index
        return high


def _key(op: Op) -> tuple[object, ...]:
    return op.target, op.module, op.parameters


def _require_gathered(weights: PlannedWeights, moved: Plan, new: ModelGraph) -> None:
    """Raises PlanError for a parameter that a stage would read and does not gather."""
    for before, after in zip(weights.reads, moved.pipelines, strict=True):
        for gathered, read in zip(before, stages_reading(after, new), strict=True):
            for name in sorted(read - gathered - {buffer.name for buffer in new.buffers}):
                raise PlanError(
                    f"{name!r} would be read by a stage that does not gather it under this plan ('zero': 3)"
                )


def _require_held(held: Holdings, moved: Plan, new: ModelGraph, whole: Collection[str]) -> None:
    """Raises PlanError for a parameter or buffer that is read where it is not held; ``whole``: those that all devices hold."""
    wanted = holdings_of(moved, new)
    read = {name for op in new.ops for name in op.parameters}
    for name, devices in wanted.items():
        for device, box in devices.items() if name in read else ():
            if device not in held.get(name, {}) and name not in whole:
                raise PlanError(f"{name!r} would be read on {device}, which does not hold it under this plan")
            if box != (() if name in whole else held[name][device]):
                raise PlanError(
                    f"{name!r} would be cut in another way on {device} than it is held there under this plan"
                )

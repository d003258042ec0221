"""Memory of a step that is not allocated at its start: gradients and unsharded parameters, each with its lifetime.

A gradient on a single device is allocated in the first backward, and so is the own shard of one under ZeRO-2 or ZeRO-3; under ZeRO-1 a
backend may sum in separate memory behind the last backward. A backward runs the blocks of a stage from the last to the first; each frees
its activations and leaves gradients.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from heterodyne.cost.memory import gradient_bytes
from heterodyne.cost.position import Position
from heterodyne.cost.step import Reduction
from heterodyne.graph.ir import ModelGraph
from heterodyne.plan.buckets import Bucket
from heterodyne.plan.plan import Plan

if TYPE_CHECKING:
    from heterodyne.cost.model import CostModel

__all__ = ["GradientBuildUp", "StepTransients", "by_block"]

Ops = tuple[int, int]


@dataclass(frozen=True, kw_only=True)
class GradientBuildUp:
    """Bytes of gradients of one stage, by parameter, each at the first op of the backward that makes it.

    ``first``: allocated by the first backward; ``last``: in addition by the last one.
    """

    first: Mapping[str, float] = field(default_factory=dict)
    last: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class StepTransients:
    """Of one device. Gradients in persistent buffers are not included.

    Args:
        stages: gradients of each stage.
        alone: bytes of the gradients that only this device has.
        trained: bytes of the trainable parameters that are sharded with others.
        gathered: bytes of each unsharded bucket, by stage that reads it.
        reductions: of each bucket of gradients that is sharded.
    """

    stages: Mapping[int, GradientBuildUp] = field(default_factory=dict)
    alone: int = 0
    trained: int = 0
    gathered: Mapping[int, Mapping[int, int]] = field(default_factory=dict)
    reductions: Mapping[int, Reduction] = field(default_factory=dict)

    def of_stage(self, number: int) -> GradientBuildUp:
        return self.stages.get(number, GradientBuildUp())

    @classmethod
    def of(cls, model: CostModel, at: Position, buckets: Sequence[Bucket], part: float, plan: Plan) -> StepTransients:
        """``part``: the fraction of the shared parameters that the device updates."""
        mine = [bucket for bucket in buckets if at.device in bucket.owners]
        shared = [bucket for bucket in mine if len(bucket.owners) > 1]
        held = model.device_memory[at.device].held([stage.ops for stage in at.stages.values()], at.boxes)
        bytes_of = {p.name: gradient_bytes(p) for p in held if p.trainable}
        runs = {number: sum(size > 0 for size in at.sizes(number)) for number in at.stages}
        others = {name for bucket in shared for name in bucket.parameters}
        first: dict[str, float] = {n: float(size) for n, size in bytes_of.items() if n not in others}
        last: dict[str, float] = {}
        alone = sum(first.values())
        reductions: dict[int, Reduction] = {}
        gathered: dict[int, dict[int, int]] = {}
        for bucket in shared:
            readers = [n for n in at.stages if not at.reads[n].isdisjoint(bucket.parameters)]
            if plan.zero == 1 and model.cluster.device(at.device).backend != "cpu":
                last.update({name: part * bytes_of[name] for name in bucket.parameters})
            if plan.zero < 2:
                continue
            times = sum(runs[n] for n in readers)
            size = sum(bytes_of[name] for name in bucket.parameters)
            stage = next(n for n in readers if runs[n]) if times == 1 else None
            reductions[bucket.index] = Reduction(bytes=size, own=round(part * size), stage=stage, made=times > 0)
            if stage is not None:
                # A gradient is there when it has come from all ops that read the parameter.
                start, stop = at.stages[stage].ops
                reached = {name: n for n in reversed(range(start, stop)) for name in model.graph.ops[n].parameters}
                places = [reached[name] for name in bucket.parameters if name in reached]
                reductions[bucket.index] = replace(
                    reductions[bucket.index],
                    opens=max(places),
                    closes=min(places),
                    released=_released(model, at, stage, max(places)),
                )
            if times:
                first.update({name: (part if times == 1 else 1.0) * bytes_of[name] for name in bucket.parameters})
            for number in readers if plan.zero > 2 else ():
                gathered.setdefault(number, {})[bucket.index] = bucket.bytes
        return cls(
            stages=_by_stage(at, first, last),
            alone=round(alone),
            trained=sum(bucket.bytes for bucket in shared),
            gathered=gathered,
            reductions=reductions,
        )


def _released(model: CostModel, at: Position, number: int, place: int) -> int:
    """Bytes that the only backward of a stage has freed before it reaches an op; recomputed activations only within the block."""
    (size,) = (size for size in at.sizes(number) if size)
    stage = at.stages[number]
    again = next((b for b in map(model.graph.blocks.__getitem__, stage.recompute) if b.start <= place < b.stop), None)
    behind = (place + 1, stage.ops[1] if again is None else min(stage.ops[1], again.stop))
    if behind[0] >= behind[1] or (again is None and stage.recompute):
        return 0
    return model.kept_by(at, number, size, behind)


def _by_stage(at: Position, first: Mapping[str, float], last: Mapping[str, float]) -> dict[int, GradientBuildUp]:
    """A gradient is allocated in the last stage that reads it, and complete in the first one."""
    numbers = sorted(at.stages)
    home = {name: number for number in numbers for name in at.reads[number]}
    end = {name: number for number in reversed(numbers) for name in at.reads[number]}
    return {
        number: GradientBuildUp(
            first={name: size for name, size in first.items() if home.get(name) == number},
            last={name: size for name, size in last.items() if end.get(name) == number},
        )
        for number in numbers
    }


def by_block(graph: ModelGraph, ops: Ops, gradients: Mapping[str, float]) -> list[tuple[Ops, float]]:
    """The blocks of a stage in the order of the backward, as op ranges, each with the bytes of the gradients that it is the first to
    allocate.
    """
    left, found = dict(gradients), []
    for block in reversed(graph.blocks):
        start, stop = max(ops[0], block.start), min(ops[1], block.stop)
        if start < stop:
            names = {name for op in graph.ops[start:stop] for name in op.parameters}
            found.append(((start, stop), sum(left.pop(name, 0.0) for name in names)))
    return found

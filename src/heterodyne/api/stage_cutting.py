"""Pieces of the captured model for the runtime, also for inputs of other shapes than it was captured with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from heterodyne.errors import DataError
from heterodyne.frontend import Captured, CapturedModel
from heterodyne.frontend.stage_program import StageProgram
from heterodyne.measure.whole_model import without_weights
from heterodyne.plan.plan import Pipeline
from heterodyne.plan.sharded_stage import shard_stage
from heterodyne.recent import Recent
from heterodyne.runtime.exact.exchange import SampleExchange
from heterodyne.runtime.recapture.variants import Again, Capture
from heterodyne.runtime.stages.joint_loss import LossOfParts
from heterodyne.runtime.stages.new_shapes import Shapes
from heterodyne.runtime.stages.segments import Runnable
from heterodyne.runtime.weights.materialise import stored_tensors

__all__ = ["StageCutter", "again_of"]


def again_of(captured: CapturedModel, model: nn.Module) -> Again:
    """Return what captures the model again, as the script has it then; now it has all its weights, or as meta tensors."""
    whole = {name: torch.empty_like(tensor, device="meta") for name, tensor in stored_tensors(model)}

    def again(now: nn.Module, rebound: Mapping[str, Tensor], numbers: Sequence[str]) -> Capture:
        twin = without_weights(now, like={**whole, **rebound})
        if not isinstance(captured, Captured):
            found = captured.again(twin)
            return Capture(graph=found.graph, loss_count=found.loss_count, programs=None)
        traced = captured.again(twin, numbers=_of_modules(twin, numbers))
        traced.refuse_reads_around(now)
        return Capture(
            graph=traced.graph,
            loss_count=traced.loss_count,
            programs=StageCutter(traced, twin),
            numbers=traced.numbers,
            left=traced.left,
        )

    return again


def _of_modules(module: nn.Module, names: Sequence[str]) -> list[str]:
    """Return those of the names that are attributes of modules, with the path of these."""
    parts = dict(module.named_modules())
    split = [(name, *name.rpartition(".")[::2]) for name in names]
    return [name for name, path, own in split if path in parts and own in vars(parts[path])]


class StageCutter:
    """Cuts stages out of a captured model; for inputs of other shapes it captures the model again.

    A plan counts ops, so it holds for any shape that gives the same ops: longer or shorter sequences do. Each rank captures for
    itself and gets the same, for capture is a function of the model and the shapes.
    """

    def __init__(self, captured: Captured, model: nn.Module) -> None:
        self._captured = captured
        # As it is now: later its weights are parts, or have no values, where a plan has them so.
        self._model = without_weights(model)
        # Stages of a shape are made one after the other, and then kept by who asked for them: a graph is needed no longer.
        self._other: Recent[Shapes, Captured] = Recent(1)

    def __call__(
        self,
        start: int,
        stop: int,
        starts: Sequence[int],
        batch: Mapping[str, Tensor] | None,
        sharded: tuple[Pipeline, int] | None = None,
    ) -> StageProgram:
        """See `heterodyne.runtime.stages.stage_builder.StagePrograms`. Raises DataError if these shapes give other ops, or other parts."""
        captured = self._captured if batch is None else self._at(batch)
        if sharded is None:
            return captured.stage(start, stop, starts=starts)
        sharding = shard_stage(captured.graph, *sharded)
        planned = shard_stage(self._captured.graph, *sharded)
        assert sharding is not None
        assert planned is not None
        if any(sharding.boxes(p.name) != planned.boxes(p.name) for p in captured.graph.parameters):
            raise DataError(
                "for inputs of these shapes the weights would be cut in another way than for those that the model was planned with: pad "
                "the batches to one length, or plan for these"
            )
        return captured.stage(start, stop, starts=starts, sharding=sharding)

    def coupled(
        self, batch: Mapping[str, Tensor] | None, module: nn.Module, device: torch.device, exchange: SampleExchange
    ) -> Runnable:
        """See `heterodyne.runtime.stages.stage_builder.StagePrograms`."""
        captured = self._captured if batch is None else self._at(batch)
        return captured.coupled(module, device, exchange)

    def loss_together(
        self, batch: Mapping[str, Tensor] | None, module: nn.Module, device: torch.device, exchange: SampleExchange
    ) -> LossOfParts:
        """See `heterodyne.runtime.stages.stage_builder.StagePrograms`."""
        captured = self._captured if batch is None else self._at(batch)
        return captured.loss_together(module, device, exchange)

    def _at(self, batch: Mapping[str, Tensor]) -> Captured:
        shapes = tuple((name, tuple(tensor.shape[1:])) for name, tensor in sorted(batch.items()))
        return self._other.get(shapes, lambda: self._anew(shapes, batch))

    def _anew(self, shapes: Shapes, batch: Mapping[str, Tensor]) -> Captured:
        graph = self._captured.graph
        numbers = self._captured.numbers
        found = self._captured.again(self._model, batch=dict(batch), numbers=numbers.names)
        same = found.numbers.inputs.keys() == numbers.inputs.keys()
        if not same or [op.target for op in found.graph.ops] != [op.target for op in graph.ops]:
            told = ", ".join(f"{name} {list(shape)}" for name, shape in shapes)
            raise DataError(
                f"for inputs of the shapes {told} the model has other ops than for those that it was planned with, so the plan's "
                "cuts say nothing about it: pad the batches to one length, or plan for these"
            )
        return found

"""From a global batch to what a rank does of it: checked, cut, and counted in the loss."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from torch import Tensor

from heterodyne.errors import DataError
from heterodyne.graph.ir import ModelGraph
from heterodyne.job import OptimizerSection
from heterodyne.loss_count import LossCount
from heterodyne.plan.placement import RankRole
from heterodyne.runtime.comm.communicator import Communicator
from heterodyne.runtime.exact.weighting import Weights, part_statistics
from heterodyne.runtime.executor import Step
from heterodyne.runtime.liveness.watchdog import Watchdog
from heterodyne.runtime.slices import BatchSource, GlobalBatchLike, OneShape, as_source, is_source
from heterodyne.runtime.stages.stage_builder import (
    StageBuilder,
    StageRuntime,
)
from heterodyne.runtime.values_in_range import ValuesInRange
from heterodyne.runtime.weights.optimizer import (
    learning_rate,
)

__all__ = ["BatchWork"]


class BatchWork:
    """Of one rank.

    Args:
        stages: what runs the rank's part of the model.
        loss_count: how the losses of the parts of a batch make up the loss of the batch.
        section: of the job, whose rate is scheduled over ``total_steps``; None: the optimizer's rate is its own.
        watch: is informed when the model is captured anew for inputs of another shape.
    """

    def __init__(
        self,
        graph: ModelGraph,
        stages: StageBuilder,
        communicator: Communicator,
        *,
        role: RankRole,
        global_batch_size: int,
        loss_count: LossCount,
        buffers: Mapping[str, Tensor],
        section: OptimizerSection | None,
        total_steps: int,
        watch: Watchdog | None,
    ) -> None:
        self._graph, self._stages, self._communicator = graph, stages, communicator
        self._role, self._global_batch_size, self._loss_count = role, global_batch_size, loss_count
        self._buffers, self._section, self._total_steps, self._watch = buffers, section, total_steps, watch
        self._values = ValuesInRange(graph)
        self._spans = {stage: role.spans(stage) for stage in role.stages}

    def prepare(self) -> None:
        """Make what runs inputs of the shapes that the model was captured with. Raises PlanError for a cut that would change the result."""
        self._stages.parts()

    @property
    def runs_compiled(self) -> bool:
        """Whether all that this rank runs of the model is compiled code."""
        return self._stages.runs_compiled

    def step(self, batch: GlobalBatchLike, number: int, numbers: Mapping[str, Tensor] = MappingProxyType({})) -> Step:
        """What the executor runs. ``numbers``: of the model, that its graph is given beside the batch.

        Raises DataError for a batch of another size than the plan's.
        """
        source = self.source(batch, f"step {number + 1}")
        if source.size != self._global_batch_size:
            raise DataError(
                f"the batch has {source.size} samples, the plan was made for {self._global_batch_size}: "
                "pass global batches of that size (a DataLoader leaves out a shorter last one with drop_last=True), or plan again"
            )
        role = self._role
        ends = self._spans[role.stages[-1]] if role.last else ()
        slices, own = part_statistics(self._loss_count, source, ends, self._buffers)
        # Where the devices of the last stage are sharded, all of them count the same samples.
        answers = role.answers
        return Step(
            number=number,
            source=source,
            parts=self.parts(source),
            sizes=role.micro_batches.sizes,
            spans=self._spans,
            slices=slices,
            numbers=self.given(numbers),
            weights=Weights(self._loss_count, own, source.size, self._communicator.control, answers=answers),
            learning_rate=None if self._section is None else learning_rate(self._section, number, self._total_steps),
        )

    def given(self, numbers: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return the numbers, where pieces of a graph run; the module reads its own."""
        return numbers if self._stages.cut else {}

    def source(self, batch: GlobalBatchLike, where: str) -> BatchSource:
        """Samples of a batch, whose values the model can look up. Raises DataError, with ``where`` they are."""
        source = as_source(batch, self._graph)
        if not is_source(batch):
            self._values.require(source.samples(0, source.size), 0, where)
            return source
        source = self._values.source(source, where)
        if not self._stages.cut:
            return source
        return OneShape(source, {entry.name: entry.batch_dim for entry in self._graph.inputs})

    def parts(self, source: BatchSource) -> StageRuntime:
        """What runs inputs of the shape of these."""
        batch = source.samples(0, 1) if self._stages.cut else None
        if self._watch is None or self._stages.has_parts(batch):
            return self._stages.parts(batch)
        with self._watch.phase("capturing the model for inputs of another shape"):
            return self._stages.parts(batch)

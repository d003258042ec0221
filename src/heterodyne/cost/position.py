"""A device in a pipeline: which stages it holds, and which samples it works on there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from heterodyne.plan.boxes import Box
from heterodyne.plan.plan import Pipeline, Stage
from heterodyne.plan.slices import slices

__all__ = ["Position", "slices_of"]


@dataclass(frozen=True)
class Position:
    """A device in a pipeline. ``taken``: of each stage its devices' slices; ``boxes``: of the parameters that it has a part of."""

    device: str
    pipeline: Pipeline
    taken: Sequence[Mapping[str, Sequence[tuple[int, int]]]]
    boxes: Mapping[str, Box]

    @cached_property
    def stages(self) -> dict[int, Stage]:
        """Those that it holds, by number."""
        return {number: stage for number, stage in enumerate(self.pipeline.stages) if self.device in stage.devices}

    def sizes(self, number: int) -> tuple[int, ...]:
        """The samples of each micro-batch that it works on in a stage: all, where the stage lies in parts."""
        if self.pipeline.stages[number].sharded:
            return self.pipeline.micro_batches.sizes
        return tuple(count for _, count in self.taken[number][self.device])


def slices_of(pipeline: Pipeline) -> tuple[dict[str, tuple[tuple[int, int], ...]], ...]:
    """For each stage its devices, each with its ``(first sample, count)`` of every micro-batch, counted within the micro-batch."""
    made = []
    for stage in pipeline.stages:
        shares = next((r.layout.shares for r in stage.regions if r.task_graph == "*"), (1,) * len(stage.devices))
        cut = {size: slices(size, shares) for size in set(pipeline.micro_batches.sizes)}
        made.append(
            {
                device: tuple(cut[size][place] for size in pipeline.micro_batches.sizes)
                for place, device in enumerate(stage.devices)
            }
        )
    return tuple(made)

"""A device in a pipeline: its stages, and its samples there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from heterodyne.plan.boxes import Box
from heterodyne.plan.plan import Pipeline, Stage

__all__ = ["Position", "slices_of", "worked_on"]


@dataclass(frozen=True)
class Position:
    """``taken``: for each stage the slices of its devices; ``boxes``: of the parameters that the device holds in part; ``reads``:
    for each stage the parameters that it reads."""

    device: str
    pipeline: Pipeline
    taken: Sequence[Mapping[str, Sequence[tuple[int, int]]]]
    boxes: Mapping[str, Box]
    reads: Sequence[frozenset[str]]

    @cached_property
    def stages(self) -> dict[int, Stage]:
        """Those that it holds, by number."""
        return {number: stage for number, stage in enumerate(self.pipeline.stages) if self.device in stage.devices}

    def row(self, number: int) -> int:
        """The row of the stage's mesh in which the device is."""
        return next(row for row, devices in enumerate(self.stages[number].rows) if self.device in devices)

    def sizes(self, number: int) -> tuple[int, ...]:
        """The samples of each micro-batch that it works on in a stage."""
        return worked_on(self.pipeline, number)[self.device]


def slices_of(pipeline: Pipeline) -> tuple[dict[str, tuple[tuple[int, int], ...]], ...]:
    """For each stage its devices, each with its ``(first sample, count)`` of every micro-batch, counted within the micro-batch."""
    made = []
    for stage in pipeline.stages:
        cut = {size: stage.slices(size) for size in set(pipeline.micro_batches.sizes)}
        made.append(
            {
                device: tuple(cut[size][place] for size in pipeline.micro_batches.sizes)
                for place, device in enumerate(stage.devices)
            }
        )
    return tuple(made)


def worked_on(pipeline: Pipeline, number: int) -> dict[str, tuple[int, ...]]:
    """For each device of a stage the samples of every micro-batch that it works on: in a sharded stage those of its row."""
    stage, sizes = pipeline.stages[number], pipeline.micro_batches.sizes
    cut = {size: stage.worked_on(size) for size in set(sizes)}
    return {device: tuple(cut[size][place][1] for size in sizes) for place, device in enumerate(stage.devices)}

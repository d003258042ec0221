"""A trial: each device does its share of a plan once, all at the same time, before the plan is believed.

Curves of single blocks and of single micro-batches carry noise, and devices that compute for seconds meet what short sections
do not: allocators that give pages back, caches that neighbours fill, clocks that go down. A trial measures just what balance
depends on: the seconds of a whole share.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Protocol

import torch
from torch import nn

from heterodyne.measure.block_run import BlockProgram, BlockRun
from heterodyne.measure.notes import words_of
from heterodyne.measure.workbench import Workbench

__all__ = ["TrialPart", "Work", "try_share"]

_LEAST_S = 2.0
_MOST_SAMPLES = 5


class TrialPart(BlockProgram, Protocol):
    """A part of the model, or all of it, whose inputs can be had without its weights."""

    def inputs_of(self, batch: int, device: torch.device) -> Sequence[object]:
        """Inputs of so many samples for the module that `instantiate` makes."""
        ...


Work = Sequence[tuple[TrialPart, Sequence[int]]]
"""Parts of the model (the whole, or stages of it), each with its micro-batches."""


@dataclass(frozen=True)
class _Built:
    """The same weights at every size: one copy of a part is in memory, however many sizes its share has."""

    part: TrialPart
    module: nn.Module

    def instantiate(self, batch: int, device: torch.device, *, seed: int = 0) -> tuple[nn.Module, Sequence[object]]:
        del seed
        return self.module, self.part.inputs_of(batch, device)


def try_share(work: Work, bench: Workbench) -> float:
    """Seconds of forward and backward of these micro-batches, one after the other: the median of a few times, or one long time; 0 for none.

    One part is there at a time, so that no more weights and gradients are than the largest has: a plan may share out the others.

    Collective: the ranks begin together, and who is done first goes on computing until the last is done. Raises MeasureError, on
    every rank alike, if it fails on any.
    """
    parts = [(part, sizes) for part, sizes in work if sizes]
    runs: list[BlockRun] = []
    failure: str | None = None
    cause: Exception | None = None
    seconds = 0.0
    try:
        runs = _runs_of(*parts[0], bench) if parts else []
    except Exception as error:  # noqa: BLE001  # whatever it is, the others wait for the outcome
        failure, cause = f"its share cannot be tried: {words_of(error)}", error
    bench.meet(failure=failure, cause=cause)
    try:
        for number, part in enumerate(parts):
            if number:
                runs[0].let_go()
                runs = _runs_of(*part, bench)
            seconds += _seconds(runs, bench, _LEAST_S / len(parts))
    except Exception as error:  # noqa: BLE001  # as above
        failure, cause = f"its share cannot be tried: {words_of(error)}", error
    bench.meet(runs[-1] if runs and failure is None else None, failure=failure, cause=cause)
    if runs:
        runs[0].let_go()
    return seconds


def _runs_of(part: TrialPart, micro_batches: Sequence[int], bench: Workbench) -> list[BlockRun]:
    """Return what to run, in order, all on one module. It has run once, so that its gradients exist."""
    module, _ = part.instantiate(micro_batches[0], bench.device)
    built = _Built(part, module)
    of_size = {size: bench.run_of(built, size) for size in sorted(set(micro_batches))}
    of_size[min(of_size)]()
    return [of_size[size] for size in micro_batches]


def _seconds(runs: Sequence[BlockRun], bench: Workbench, least_s: float) -> float:
    clock = bench.stopwatch
    seconds: list[float] = []
    while len(seconds) < _MOST_SAMPLES and (
        sum(seconds) < least_s or (len(seconds) < 3 and min(seconds) < least_s / 2)
    ):
        start = clock.mark()
        for run in runs:
            run()
        seconds.append(clock.seconds(start, clock.mark()))
    return median(seconds)

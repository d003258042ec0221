"""A trial: each device does its share of a plan once, all at the same time, before the plan is believed.

Curves of single blocks and of single micro-batches carry noise, and devices that compute for seconds meet what short sections
do not: allocators that give pages back, caches that neighbours fill, clocks that go down. A trial measures just what balance
depends on: the seconds of a whole share.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import torch
from torch import nn

from heterodyne.measure.block_run import BlockRun
from heterodyne.measure.notes import words_of
from heterodyne.measure.whole_model import WholeModel
from heterodyne.measure.workbench import Workbench

__all__ = ["try_share"]

_LEAST_S = 2.0
_MOST_SAMPLES = 5


@dataclass(frozen=True)
class _Built:
    """The same weights at every size: one model is in memory, however many sizes a share has."""

    whole: WholeModel
    module: nn.Module

    def instantiate(
        self, batch: int, device: torch.device, *, seed: int = 0
    ) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
        del seed
        return self.module, self.whole.inputs_of(batch, device)


def try_share(whole: WholeModel, micro_batches: Sequence[int], bench: Workbench) -> float:
    """Seconds of forward and backward of these micro-batches, one after the other: the median of a few times, or one long time; 0 for none.

    Collective: the ranks begin together, and who is done first goes on computing until the last is done. Raises MeasureError, on
    every rank alike, if it fails on any.
    """
    runs: dict[int, BlockRun] = {}
    failure: str | None = None
    cause: Exception | None = None
    seconds = 0.0
    try:
        runs = _runs_of(whole, micro_batches, bench)
    except Exception as error:  # noqa: BLE001  # whatever it is, the others wait to be told
        failure, cause = f"its share cannot be tried: {words_of(error)}", error
    bench.meet(failure=failure, cause=cause)
    try:
        seconds = _seconds(runs, micro_batches, bench) if runs else 0.0
    except Exception as error:  # noqa: BLE001  # as above
        failure, cause = f"its share cannot be tried: {words_of(error)}", error
    bench.meet(runs[micro_batches[-1]] if runs and failure is None else None, failure=failure, cause=cause)
    return seconds


def _runs_of(whole: WholeModel, micro_batches: Sequence[int], bench: Workbench) -> dict[int, BlockRun]:
    """The model at each of the sizes; it has run once, so that gradients exist."""
    if not micro_batches:
        return {}
    module, _ = whole.instantiate(micro_batches[0], bench.device)
    built = _Built(whole, module)
    runs = {size: bench.run_of(built, size) for size in sorted(set(micro_batches))}
    runs[min(runs)]()
    return runs


def _seconds(runs: Mapping[int, BlockRun], micro_batches: Sequence[int], bench: Workbench) -> float:
    clock = bench.stopwatch
    seconds: list[float] = []
    while len(seconds) < _MOST_SAMPLES and (
        sum(seconds) < _LEAST_S or (len(seconds) < 3 and min(seconds) < _LEAST_S / 2)
    ):
        start = clock.mark()
        for size in micro_batches:
            runs[size]()
        seconds.append(clock.seconds(start, clock.mark()))
    return median(seconds)

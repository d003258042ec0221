"""Seconds a byte of copies between the device of this rank and pinned memory of its host, beside those of all others."""

from __future__ import annotations

from collections.abc import Callable

import torch

from heterodyne.measure.notes import words_of
from heterodyne.measure.sampling import sample
from heterodyne.measure.workbench import Workbench

__all__ = ["measure_host_copies"]


def measure_host_copies(bench: Workbench, *, budget_s: float = 10.0, most_bytes: int = 64 * 2**20) -> float:
    """Of the slower direction; 0 on a CPU, which is its own host.

    Devices of one machine share the way to its memory, so all copy at the same time. Raises MeasureError, on every rank alike, if it
    fails on any.
    """
    failure: str | None = None
    work: Callable[[], tuple[object, ...]] | None = None
    cause: Exception | None = None
    seconds = 0.0
    bench.meet()
    bench.progress("copies to the host", 1, 1)
    try:
        if bench.device.type != "cpu":
            work = _there_and_back(bench, most_bytes)
            timing = sample(work, bench.stopwatch, bench.sampling, budget_s=budget_s)
            seconds = max(timing.laps) / most_bytes
    except Exception as error:  # noqa: BLE001  # whatever it is, the others wait for the outcome
        failure, work, cause = f"copies to the host cannot be measured: {words_of(error)}", None, error
    bench.meet(work, failure=failure, cause=cause)
    return seconds


def _there_and_back(bench: Workbench, size_bytes: int) -> Callable[[], tuple[object, ...]]:
    here = torch.zeros(size_bytes, dtype=torch.uint8, device=bench.device)
    there = torch.zeros(size_bytes, dtype=torch.uint8, pin_memory=True)
    clock = bench.stopwatch

    def work() -> tuple[object, ...]:
        start = clock.mark()
        there.copy_(here, non_blocking=True)
        middle = clock.mark()
        here.copy_(there, non_blocking=True)
        return start, middle, clock.mark()

    return work

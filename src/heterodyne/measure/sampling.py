"""How a short piece of work is timed on a noisy machine: warm-up, repeats, the median, and the spread kept.

A device whose share is throttled (a container's CPU quota, a power cap) runs in bursts: within a period of some
milliseconds it computes and then stands still. One run of 1 ms then takes 1 ms or 4 ms, and the median of such runs is
neither. So each *sample* repeats the work until it spans many periods, and medians are taken over samples.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from statistics import median, quantiles

from heterodyne.errors import MeasureError
from heterodyne.measure.clock import Mark, Stopwatch

__all__ = ["Sampling", "Timing", "sample", "summarise"]

_FEWEST = 2  # of long work, if they agree
_RUNS = 1000  # at most so many are started before the clock is read

Work = Callable[[], tuple[Mark, ...]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampling:
    """How much is enough.

    Args:
        warm_up: runs that are not counted (caches, allocators, kernels that are compiled when first met), fewer if they are long.
        sample_s: a sample repeats the work until it spans this long.
        samples: at least so many,
        section_s: and until they span this long together. Since all devices measure side by side, this is also what keeps them
            busy at the same time.
        steady: the standard error of the median, over the median, with which a section may end;
        patience: it ends in any case when it has lasted so many times as long; a disturbance that ends is then outvoted.
        most_samples: never more than so many.
        long_s: once samples span this long, two will do if they agree and three if not: long work averages over disturbances by
            itself. Work of which a run takes a quarter of it needs but one run of warm-up.
    """

    warm_up: int = 2
    sample_s: float = 0.04
    samples: int = 5
    section_s: float = 0.3
    steady: float = 0.03
    patience: float = 4.0
    most_samples: int = 60
    long_s: float = 1.2

    def is_enough(self, taken: list[tuple[float, ...]], section_s: float) -> bool:
        """Return whether these samples, which took ``section_s``, will do."""
        count = len(taken)
        if count >= self.most_samples:
            return True
        is_long = count >= _FEWEST and section_s >= self.long_s
        if not is_long and (count < self.samples or section_s < self.section_s):
            return False
        longest_s = self.patience * max(self.section_s, self.samples * self.sample_s)
        return (count > _FEWEST and section_s >= longest_s) or summarise(taken).error <= self.steady

    def needs_no_more_warm_up(self, run_s: float) -> bool:
        """Return whether work that took that long when it ran first is warm."""
        return run_s >= self.long_s / 4

    def least_s(self, run_s: float) -> float:
        """Seconds of warm-up and of one sample, if a run takes ``run_s`` and the work has run before."""
        warm_up_s = 0.0 if self.needs_no_more_warm_up(run_s) else self.warm_up * run_s
        return warm_up_s + max(run_s, self.sample_s)


@dataclass(frozen=True, kw_only=True, slots=True)
class Timing:
    """Median seconds of each lap of one run, and the spread of their sum: distance of the quartiles over the median."""

    laps: tuple[float, ...]
    spread: float
    samples: int

    @property
    def seconds(self) -> float:
        return sum(self.laps)

    @property
    def error(self) -> float:
        """The standard error of the median over the median: 1.25 sigma / sqrt(n), where the quartiles are 1.35 sigma apart."""
        return 1.2533 / 1.349 * self.spread / math.sqrt(self.samples)


def sample(
    work: Work, clock: Stopwatch, sampling: Sampling, *, budget_s: float = float("inf"), run_s: float = 0.0
) -> Timing:
    """Time ``work``, which runs once and returns its marks: n + 1 marks bound n laps; what is outside them is not counted.

    Stops early when ``budget_s`` is used up, but never before there is one whole sample. ``run_s``: seconds that the work took
    when it ran before this, 0 if it did not.
    """
    spent = 0.0
    for _ in range(sampling.warm_up):
        if sampling.needs_no_more_warm_up(run_s):
            break
        run_s = sum(_laps([work()], clock))
        spent += run_s
    taken: list[tuple[float, ...]] = []
    section_s = 0.0
    while not taken or (spent < budget_s and not sampling.is_enough(taken, section_s)):
        laps, runs, total = _one_sample(work, clock, sampling.sample_s, run_s)
        taken.append(tuple(lap / runs for lap in laps))
        run_s = total / runs
        section_s += total
        spent += total
    return summarise(taken)


def summarise(samples: list[tuple[float, ...]]) -> Timing:
    """The median of each lap, and the spread of the sum of the laps."""
    laps = tuple(median(lap) for lap in zip(*samples, strict=True))
    totals = [sum(s) for s in samples]
    spread = 0.0
    if len(totals) > 1 and median(totals) > 0:
        low, _, high = quantiles(totals, n=4, method="inclusive")
        spread = (high - low) / median(totals)
    return Timing(laps=laps, spread=spread, samples=len(samples))


def _one_sample(work: Work, clock: Stopwatch, span_s: float, run_s: float) -> tuple[list[float], int, float]:
    """Runs that span ``span_s`` together: the sum of each lap, how many runs, and all their seconds.

    As many runs as are expected to do are started before the clock is read, so that an accelerator is not stopped between them.
    """
    laps: list[float] = []
    runs, total = 0, 0.0
    while runs == 0 or total < span_s:
        expected = (span_s - total) / run_s if run_s > 0 else 1
        count = max(1, min(_RUNS, int(expected)))
        fresh = _laps([work() for _ in range(count)], clock)
        laps = [a + b for a, b in zip(laps, fresh, strict=True)] if laps else fresh
        runs += count
        total = sum(laps)
        run_s = total / runs
        if total == 0 and runs >= _RUNS:
            raise MeasureError(f"{runs} runs took no time at all; the clock does not see this device's work")
    return laps, runs, total


def _laps(runs: list[tuple[Mark, ...]], clock: Stopwatch) -> list[float]:
    """The sum of each lap over several runs."""
    seconds = [[clock.seconds(a, b) for a, b in pairwise(marks)] for marks in runs]
    return [sum(lap) for lap in zip(*seconds, strict=True)]

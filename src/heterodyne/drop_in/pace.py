"""How fast this rank is by itself, seen from the loop's own steps, and the shares that follow.

From the moment in which the gradients of one step are reduced to the one in which the last bucket of the next is ready, a rank does its own
work: update, data, forward and backward. What comes behind is waiting for others. On an accelerator, where the host runs ahead,
its own events tell what is between the begin of the forward and the last bucket.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Final, TypeAlias

import torch

from heterodyne.graph.sharding.dealing import dealt_by_speed

__all__ = ["Pace", "better_counts"]

Moment: TypeAlias = torch.Event | float

_FIRST: Final = 4
_LONGEST: Final = 64
_GAIN: Final = 1.03  # of the step: new shares are worth it from there on


@dataclass
class _Step:
    """``begin``: None where it is not known; ``waits``: for other ranks, in the middle of it."""

    begin: Moment | None
    end: Moment
    waits: list[tuple[Moment, Moment]]
    samples: int


class Pace:
    """Own seconds and samples of each step of this rank. Several models that train in turns may have one together.

    It is a context manager around what waits for other ranks in the middle of a step. Which steps there are follows from the calls of this
    thread alone, so that all ranks count the same.
    """

    LEAST_S: Final = 0.2  # steps that were shorter, all together and on each rank, say nothing

    def __init__(self, device: torch.device) -> None:
        self._device = device if device.type != "cpu" else None
        self._steps: deque[_Step] = deque(maxlen=_LONGEST)
        self._since: Moment | None = None
        self._waits: list[tuple[Moment, Moment]] = []
        self._waits_since: Moment = 0.0
        self._forwards = self._samples = 0
        self._launched = False
        self._window = _FIRST

    @property
    def is_due(self) -> bool:
        """Return whether enough steps were seen to look at them; after the same step on every rank."""
        return len(self._steps) >= self._window

    def note_forward(self, samples: int) -> None:
        """Called as a forward with gradients begins."""
        self._forwards += 1
        self._samples += samples
        self._launched = False
        if self._device is not None and self._since is None:
            self._since = self._moment()

    def note_launch(self) -> None:
        """Called when the last bucket of a model is ready; of another model, perhaps, in the same backward."""
        if self._forwards:
            self._steps.append(_Step(self._since, self._moment(), self._waits, self._samples))
        elif self._steps:
            self._steps[-1].end = self._moment()
            self._steps[-1].waits += self._waits
        self._since, self._waits, self._forwards, self._samples, self._launched = None, [], 0, 0, True

    def note_end(self) -> None:
        """Called, by whichever thread knows, when a bucket is reduced."""
        if self._device is None and self._launched:
            self._since = time.perf_counter()

    def __enter__(self) -> None:
        self._waits_since = self._moment()

    def __exit__(self, *_: object) -> None:
        self._waits.append((self._waits_since, self._moment()))

    def take(self) -> tuple[float, float]:
        """Return the seconds of a sample and of all steps since the last call, and begin again, with a longer look."""
        steps = list(self._steps)
        self._steps.clear()
        self._window = min(_LONGEST, 2 * self._window)
        spans = [
            (_seconds(step.begin, step.end) - sum(_seconds(*wait) for wait in step.waits), max(1, step.samples))
            for step in steps
            if step.begin is not None
        ]
        if not spans:
            return 0.0, 0.0
        return median(span / samples for span, samples in spans), sum(span for span, _ in spans)

    def look_again_soon(self) -> None:
        """Called when shares have changed."""
        self._window = _FIRST

    def _moment(self) -> Moment:
        if self._device is None:
            return time.perf_counter()
        event = torch.Event(self._device, enable_timing=True)
        event.record()
        return event


def _seconds(begin: Moment, end: Moment) -> float:
    if isinstance(begin, float) and isinstance(end, float):
        return end - begin
    assert isinstance(begin, torch.Event)
    assert isinstance(end, torch.Event)
    end.synchronize()
    return begin.elapsed_time(end) / 1e3


def better_counts(counts: Sequence[int], sample_s: Sequence[float]) -> tuple[int, ...] | None:
    """Samples for each rank, in sum as many, with which a step is clearly shorter; None if there is nothing to gain."""
    if min(sample_s) <= 0:
        return None
    found = dealt_by_speed([1 / each for each in sample_s], sum(counts))
    now, then = (max(n * s for n, s in zip(each, sample_s, strict=True)) for each in (counts, found))
    return found if now > _GAIN * then else None

"""What a person sees while a run goes on: a bar on a terminal, a plain line every few seconds elsewhere."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from heterodyne.printable import printable
from heterodyne.runtime.records.metrics import StepRecord, Validation
from heterodyne.terminal import console_on
from heterodyne.units import format_seconds

__all__ = ["BarReporter", "LineReporter", "Reporter", "SilentReporter", "reporter_for"]

EVERY_S = 5.0
REFRESHES_PER_S = 2  # drawing takes time from the worker that draws
RECENT_STEPS = 50


_STEADY = 1.05  # as far above what devices reach alone as noise may bring a run


class Reporter(ABC):
    """Told of everything that a run does; ``total`` steps are to be done."""

    def __init__(self, total: int) -> None:
        self.total = total
        self._recent: deque[float] = deque(maxlen=RECENT_STEPS)
        self.slower = ""
        """Which ranks and links have become slower."""

    @abstractmethod
    def say(self, text: str) -> None:
        """A sentence of its own."""

    @abstractmethod
    def step(self, record: StepRecord) -> None:
        """A step is over."""

    @abstractmethod
    def close(self) -> None:
        """Nothing more will come."""

    def validation(self, result: Validation) -> None:
        self.say(f"step {result.step}: validation loss {result.validation_loss:.4f}")

    def _figures(self, record: StepRecord) -> str:
        """``loss 2.3456 · 123 samples/s · efficiency 93% · 2 min 05 s left``."""
        self._recent.append(record.step_s)
        left_s = (self.total - record.step) * sum(self._recent) / len(self._recent)
        parts = [f"loss {record.loss:.4f}", f"{record.samples_per_s:.4g} samples/s"]
        if record.efficiency is not None:
            # Faster than all devices alone: they were slower while they were measured.
            parts.append(
                f"efficiency {record.efficiency:.0%}" if record.efficiency <= _STEADY else "measuring was unsteady"
            )
        parts += [self.slower] if self.slower else []
        return " · ".join([*parts, f"{format_seconds(left_s)} left"])


class BarReporter(Reporter):
    """A bar that stays on the last line of a terminal."""

    def __init__(self, total: int, console: Console) -> None:
        super().__init__(total)
        self._progress = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(bar_width=None),
            TextColumn("{task.fields[figures]}"),
            console=console,
            refresh_per_second=REFRESHES_PER_S,
            transient=False,
        )
        self._task = self._progress.add_task("", total=total, figures="")
        self._progress.start()

    def say(self, text: str) -> None:
        self._progress.console.print(printable(text), markup=False, highlight=False)

    def step(self, record: StepRecord) -> None:
        self._progress.update(self._task, completed=record.step, figures=self._figures(record))

    def close(self) -> None:
        self._progress.stop()


class LineReporter(Reporter):
    """Plain lines for a log: the first step, the last, and one every few seconds.

    Args:
        stream: where to.
        every_s: the shortest time between two lines of steps.
        clock: seconds that never go back.
    """

    def __init__(
        self, total: int, stream: TextIO, *, every_s: float = EVERY_S, clock: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__(total)
        self._stream = stream
        self._every_s = every_s
        self._clock = clock
        self._next_s = clock()

    def say(self, text: str) -> None:
        print(printable(text), file=self._stream, flush=True)

    def step(self, record: StepRecord) -> None:
        figures = self._figures(record)
        now = self._clock()
        if now >= self._next_s or record.step == self.total:
            self._next_s = now + self._every_s
            self.say(f"step {record.step}/{self.total} · {figures}")

    def close(self) -> None:
        self._stream.flush()


class SilentReporter(Reporter):
    """For the ranks that have nothing to say."""

    def say(self, text: str) -> None:
        pass

    def step(self, record: StepRecord) -> None:
        pass

    def close(self) -> None:
        pass


def reporter_for(stream: TextIO, *, total: int) -> Reporter:
    """A bar if the stream is a terminal, lines if not."""
    console = console_on(stream)
    return BarReporter(total, console) if console.is_terminal else LineReporter(total, stream)

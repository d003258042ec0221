"""What a run writes and shows of itself as it goes, on rank 0: ``metrics.jsonl``, trackers, and the progress for people."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from heterodyne.job import MetricsSection
from heterodyne.run_directory import RunDirectory
from heterodyne.runtime.records.metrics import Line, MetricsFile, OuterStep, Slower, StepRecord, Validation, tracked
from heterodyne.runtime.records.progress import Reporter
from heterodyne.runtime.records.trackers.trackers import Trackers
from heterodyne.runtime.step_result import StepResult
from heterodyne.tracker_options import TrackerOptions

__all__ = ["RunRecords"]


@dataclass(kw_only=True)
class RunRecords:
    """Writes nothing until it is opened, and so nothing on the other ranks.

    Args:
        run: where; None: nowhere.
        reporter: shown each step and validation.
        samples, length: of a step; the tokens of a sample, None: it has none.
        ideal_samples_per_s: what the devices reach together when each computes for itself; None: efficiency is not known.
        trackers, config: trackers that get the same numbers, and the configuration of the run that they record.
        every, last: one step in so many is written, and the one of that number; None: nobody knows it.
        say: takes warnings.
    """

    run: RunDirectory | None
    reporter: Reporter
    samples: int
    length: int | None = None
    ideal_samples_per_s: float | None = None
    trackers: Sequence[TrackerOptions] = ()
    config: Mapping[str, Any] = field(default_factory=dict)
    every: int = 1
    last: int | None = None
    flush_s: float = MetricsSection().flush_s
    say: Callable[[str], None] = lambda _: None
    _file: MetricsFile | None = None
    _trackers: Trackers | None = None

    def open(self, done: int) -> None:
        """Begin after ``done`` steps: lines of later ones are of another past. Raises HeterodyneError if nothing can be written."""
        if self.run is not None:
            self._file = MetricsFile(self.run.metrics, done=done, say=self.say)
            self._trackers = Trackers(
                self.trackers, self.run.path, done=done, config=self.config, flush_s=self.flush_s, say=self.say
            )

    def step(self, result: StepResult, *, done: int, seconds: float, memory_bytes: int) -> None:
        """Write a step, the last of ``done``, that took ``seconds`` with the reading of its batch."""
        samples_per_s = self.samples / seconds
        record = StepRecord(
            step=done,
            loss=result.loss,
            grad_norm=result.grad_norm,
            lr=result.lr,
            step_s=seconds,
            samples_per_s=samples_per_s,
            tokens_per_s=None if self.length is None else samples_per_s * self.length,
            efficiency=samples_per_s / self.ideal_samples_per_s if self.ideal_samples_per_s else None,
            memory_bytes=memory_bytes,
            time_s=time.time(),
        )
        if done % self.every == 0 or done == self.last:
            self._write(record)
        if result.slower is not None:
            self.reporter.slower = result.slower
            self._write(Slower(step=done, slower=result.slower, time_s=time.time()))
        self.reporter.step(record)

    def outer(self, line: OuterStep) -> None:
        """Write an outer step with other sites."""
        self._write(line)

    def validation(self, loss: float, *, done: int) -> None:
        line = Validation(step=done, validation_loss=loss, time_s=time.time())
        self._write(line)
        self.reporter.validation(line)

    def close(self) -> None:
        """Wait for the trackers, for a bounded time."""
        if self._file is not None:
            self._file.close()
            self._file = None
        if self._trackers is not None:
            self._trackers.close()
            self._trackers = None
        self.reporter.close()

    def _write(self, line: Line) -> None:
        if self._file is not None:
            self._file.write(line)
        numbers = tracked(line)
        if self._trackers is not None and numbers:
            self._trackers.write(line.step, numbers, time_s=line.time_s)

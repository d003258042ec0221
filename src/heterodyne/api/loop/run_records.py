"""The run directory of a loop of one's own: what ``heterodyne report`` reads, and checkpoints."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from heterodyne.api.run_files import environment, write_plan_files
from heterodyne.api.session import Session
from heterodyne.api.settings import Prepared
from heterodyne.job import MetricsSection
from heterodyne.runtime.checkpoint.checkpoints import Checkpoints
from heterodyne.runtime.records.metrics import Slower, StepRecord, Validation
from heterodyne.runtime.records.peak_memory import peak_memory_bytes
from heterodyne.runtime.records.run_directory import RunDirectory, require_shared
from heterodyne.runtime.records.sinks import Sinks
from heterodyne.runtime.worker import StepResult, Worker
from heterodyne.text_files import write_text
from heterodyne.timeline import Timeline
from heterodyne.tracker_options import TrackerOptions

__all__ = ["RunRecords", "open_run"]

_FLUSH_S = MetricsSection().flush_s


def open_run(session: Session, path: Path, *, resume: bool) -> RunDirectory:
    """The run directory, on every rank: a new or empty one; with ``resume`` also that of a run. Raises HeterodyneError."""

    def choose() -> RunDirectory:
        there = path.is_dir() and any(path.iterdir())
        return RunDirectory.existing(path) if resume and there else RunDirectory.create(path)

    run = session.agreement.on_rank0(choose)
    require_shared(run, session.agreement)
    return run


class RunRecords:
    """Writes on rank 0 what happens in the loop; every method is called by all ranks.

    Args:
        run: None: nothing is written.
        trackers: that get the same numbers.
    """

    def __init__(
        self,
        run: RunDirectory | None,
        session: Session,
        prepared: Prepared,
        worker: Worker,
        trackers: Sequence[TrackerOptions] = (),
    ) -> None:
        self._run = run
        self._session = session
        self._prepared = prepared
        self._worker = worker
        self._trackers = trackers
        self._sinks: Sinks | None = None
        self._started_s = time.monotonic()
        self._last: StepResult | None = None
        self._validation: float | None = None
        if run is not None:
            session.agreement.only_on_rank0(lambda: write_plan_files(run, session, prepared))

    def checkpoints(self, directory: Path | None, keep: int) -> Checkpoints | None:
        """Those in that directory, or in that of the run; None where neither is known."""
        place = directory or (None if self._run is None else self._run.checkpoints)
        if place is None:
            return None
        return Checkpoints(place, keep=keep, agreement=self._session.agreement, say=self._session.say)

    def step(self, result: StepResult) -> None:
        self._last = result
        if self._run is None:
            return
        norm = result.grad_norm
        if self._session.rank != 0:
            return
        samples_per_s = self._prepared.plan.global_batch_size / result.seconds
        planned = self._prepared.planned
        ideal = None if planned is None else sum(planned.rates.values())
        record = StepRecord(
            step=result.step + 1,
            loss=result.loss,
            grad_norm=norm,
            lr=result.lr,
            step_s=result.seconds,
            samples_per_s=samples_per_s,
            tokens_per_s=None,
            efficiency=samples_per_s / ideal if ideal else None,
            memory_bytes=self._peak_memory_bytes(),
            time_s=time.time(),
        )
        self._opened(result.step).write(record)
        if result.slower is not None:
            self._opened(result.step).write(Slower(step=result.step + 1, slower=result.slower, time_s=time.time()))

    def validation(self, loss: float) -> None:
        self._validation = loss
        if self._run is not None and self._session.rank == 0:
            done = self._worker.steps_done
            self._opened(done).write(Validation(step=done, validation_loss=loss, time_s=time.time()))

    def finish(self, measured: Timeline | None) -> None:
        """Write timeline and summary."""
        if self._run is None:
            return
        peaks = self._session.agreement.gather_or_raise(self._peak_memory_bytes)
        run, last = self._run, self._last
        summary: Mapping[str, Any] = {
            "model": self._prepared.captured.graph.name,
            "parameters": self._prepared.captured.graph.parameter_count,
            "steps": self._worker.steps_done,
            "loss": None if last is None else last.loss,
            "validation_loss": self._validation,
            "interrupted": False,
            "seconds": time.monotonic() - self._started_s,
            "peak_memory_bytes": peaks,
            "environment": environment(),
        }
        if self._session.rank == 0:
            if measured is not None and last is not None:
                measured.save(run.timeline("measured"))
            write_text(run.summary, json.dumps(summary, indent=1) + "\n")

    def close(self) -> None:
        """Waits on rank 0 for the trackers, for a bounded time."""
        if self._sinks is not None:
            self._sinks.close()
            self._sinks = None

    def _opened(self, done: int) -> Sinks:
        """Opened with the first line, when it is known how many steps were done before: lines after that are of another past."""
        if self._sinks is None:
            assert self._run is not None
            config = {
                "model": self._prepared.captured.graph.name,
                "global_batch_size": self._prepared.plan.global_batch_size,
            }
            say = self._session.say
            self._sinks = Sinks.open(self._run, self._trackers, done=done, config=config, flush_s=_FLUSH_S, say=say)
        return self._sinks

    def _peak_memory_bytes(self) -> int:
        return peak_memory_bytes(self._worker.device) - self._worker.borrowed_bytes

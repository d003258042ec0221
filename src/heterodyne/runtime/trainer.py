"""The training loop of a job: steps, and between them validation and checkpoints; stopped in good order, continued exactly.

Every rank runs this loop with the same job and data, so all take the same turns; what is written or shown comes from rank 0.
Whether to stop is agreed on: a signal reaches the ranks at different moments, so with each step they ask whether any of them
was told to stop before it, and then all stop after that same step, with a checkpoint.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from heterodyne.errors import CheckpointError
from heterodyne.job import Job
from heterodyne.plan.plan import Plan
from heterodyne.processes.signals import StopRequest, orderly_stop
from heterodyne.run_directory import RunDirectory
from heterodyne.runtime.checkpoint.checkpoints import Checkpoints
from heterodyne.runtime.checkpoint.export import export_model
from heterodyne.runtime.checkpoint.found import Checkpoint
from heterodyne.runtime.comm.agreement import Agreement
from heterodyne.runtime.data.source import DataSource
from heterodyne.runtime.engine import DATA, Engine, Outcome
from heterodyne.runtime.records.progress import Reporter
from heterodyne.runtime.records.run_records import RunRecords
from heterodyne.runtime.sites.sites import Sites
from heterodyne.runtime.worker import Worker
from heterodyne.units import format_seconds

__all__ = ["Trainer", "identity_of"]

# How long what is under way may take once somebody has asked to stop
_FIRST_STEP_S, _STEP_S, _STEP_FACTOR = 600.0, 60.0, 20.0
_CHECKPOINT_S = 1800.0


def identity_of(job: Job, data: DataSource) -> dict[str, Any]:
    """What a run must agree in to continue another one: what decides its losses."""
    return {"job": job.decisive, "data": dict(data.identity)}


class Trainer:
    """Trains one job in one run directory.

    Args:
        worker: this rank's.
        data: training and validation samples, on every rank the same.
        job, plan: what is trained, and under which plan.
        run: where it is kept, under the same path on every rank.
        agreement: the ranks.
        reporter: shown what happens, on rank 0; silent on the others.
        ideal_samples_per_s: what the devices reach together when each computes for itself; None: efficiency is not known.
        phase: entered, with words, around what takes long and is no step (checkpoints).
        sites: the outer steps with other sites; None: there are none.
    """

    def __init__(
        self,
        *,
        worker: Worker,
        data: DataSource,
        job: Job,
        plan: Plan,
        run: RunDirectory,
        agreement: Agreement,
        reporter: Reporter,
        ideal_samples_per_s: float | None = None,
        phase: Callable[[str], AbstractContextManager[Any]] = nullcontext,
        sites: Sites | None = None,
    ) -> None:
        self._worker = worker
        self._data = data
        self._job = job
        self._run = run
        self._ranks = agreement
        self._reporter = reporter
        self._phase = phase
        self._checkpoints = Checkpoints(
            run.checkpoints, keep=job.checkpoint.keep, agreement=agreement, say=self._say_first
        )
        records = RunRecords(
            run=run,
            reporter=reporter,
            samples=data.batch_size,
            length=data.sequence_length,
            ideal_samples_per_s=ideal_samples_per_s,
            trackers=job.metrics.wanted,
            config=job.model_dump(mode="json", exclude_none=True),
            every=job.metrics.every,
            last=job.training.steps,
            flush_s=job.metrics.flush_s,
            say=reporter.say,
        )
        self._engine = Engine(
            worker=worker,
            agreement=agreement,
            plan=plan,
            identity=identity_of(job, data),
            records=records,
            say=self._say_first,
            most_skipped=job.training.max_skipped_steps,
            phase=phase,
            sites=sites,
        )
        self._saved: int | None = None
        self._failed = 0  # checkpoints in a row

    def resume(self, found: Checkpoint | None = None, *, same_plan: bool = False) -> int:
        """Continue from a checkpoint, None: the newest whole one; steps that are done. Without any the run starts anew.

        ``same_plan``: steps should take as long as before.

        Raises CheckpointError if the checkpoint is of another job or of other data.
        """
        with self._phase("reading a checkpoint"):
            found = found or self._checkpoints.latest()
            if found is None:
                self._say_first("there is no checkpoint yet: the run starts from its beginning")
                return 0
            beside = self._engine.restore(self._checkpoints, found, same_plan=same_plan)
            if beside.get(DATA) is not None:
                self._data.load_state_dict(beside[DATA])
            self._saved = self._engine.done
        self._say_first(f"resuming after step {self._engine.done} from {found.path}")
        return self._engine.done

    def train(self) -> Outcome:
        """Do the steps that are left. Raises CheckpointError, DataError or WorkerError; what was written before stays readable."""
        began = self._engine.done
        self._engine.begin()
        try:
            with orderly_stop("the beginning of training", _FIRST_STEP_S, self._say_first) as stop:
                # True where the other sites have done all steps meanwhile.
                if began < self._engine.done == self._job.training.steps:
                    self._validate()
                interrupted = self._loop(stop)
                stop.begin("the last checkpoint", _CHECKPOINT_S)
                if self._saved != self._engine.done:
                    self._save()
                self._engine.prune()
        finally:
            with self._phase("finishing the trackers"):
                self._engine.close()
        return self._engine.outcome(interrupted=interrupted)

    def rescue(self) -> None:
        """See `Engine.rescue`."""
        self._engine.rescue()

    def export(self) -> Path:
        """Write the weights as they are now into the run's ``model/``; where they are. Raises CheckpointError."""
        with self._phase("writing the weights"):
            weights = self._worker.state.weights()
            return self._ranks.on_rank0(lambda: export_model(self._worker.module, self._run.model, weights))

    def _loop(self, stop: StopRequest) -> bool:
        """Whether it was interrupted."""
        steps, every = self._job.training.steps, self._job.checkpoint.every
        engine = self._engine
        while engine.done < steps:
            longest_s = engine.longest_s
            most_s = _FIRST_STEP_S if longest_s is None else max(_STEP_S, _STEP_FACTOR * longest_s)
            takes = "" if longest_s is None else f" (the longest took {format_seconds(longest_s)})"
            stop.begin(f"step {engine.done + 1}{takes} with its checkpoint", most_s)
            result = engine.step(lambda: self._data.batch(engine.done), stop)
            if result.slower:
                self._say_first("another plan may be faster now: Ctrl-C, and go on with --resume --replan")
            if engine.done < steps and engine.stopping(stop):
                return True
            if self._validation_is_due():
                stop.begin("the validation", _CHECKPOINT_S)
                self._validate()
            if every and engine.done % every == 0 and not engine.skips:
                stop.begin(f"the checkpoint of step {engine.done}", _CHECKPOINT_S)
                self._save_or_go_on()
        return False

    def _save_or_go_on(self) -> None:
        """A disk that has no room now may have some at the next checkpoint."""
        most = self._job.checkpoint.max_failed
        try:
            self._save()
            self._failed = 0
        except CheckpointError as error:
            self._failed += 1
            if self._failed > most:
                raise
            self._say_first(
                f"warning: {error}. Training goes on: failed checkpoints in a row: {self._failed} (more than {most} end the run)"
            )

    def _save(self) -> None:
        read = self._data.state_dict()
        self._engine.save(self._checkpoints, {} if read is None else {DATA: read})
        self._saved = self._engine.done

    def _validation_is_due(self) -> bool:
        every, done = self._job.training.validate_every, self._engine.done
        return done == self._job.training.steps or (every > 0 and done % every == 0)

    def _validate(self) -> None:
        batches = self._data.validation_batches(self._job.training.validation_samples)
        if not batches:
            return
        with self._phase("validating"):
            sums, counts = zip(*(self._worker.evaluate_sum(batch) for batch in batches), strict=True)
        self._engine.validated(math.fsum(sums) / math.fsum(counts))

    def _say_first(self, text: str) -> None:
        if self._ranks.rank == 0:
            self._reporter.say(text)

"""The training loop: steps, and between them metrics, validation and checkpoints; stopped in good order, continued exactly.

Every rank runs this loop with the same job and data, so all take the same turns; what is written or shown comes from rank 0.
Whether to stop is agreed on: a signal reaches the ranks at different moments, so with each step they ask whether any of them
was told to stop before it, and then all stop after that same step, with a checkpoint.
"""

from __future__ import annotations

import json
import math
import os
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from heterodyne.errors import CheckpointError, NumericsError
from heterodyne.job import Job
from heterodyne.json_files import read_json
from heterodyne.plan.plan import Plan
from heterodyne.processes.heap import give_back_memory
from heterodyne.processes.signals import StopRequest, orderly_stop
from heterodyne.runtime.checkpoint.checkpoints import Checkpoint, Checkpoints, taken_from
from heterodyne.runtime.checkpoint.export import export_model
from heterodyne.runtime.checkpoint.random_state import random_state, restore_random_state, taken
from heterodyne.runtime.checkpoint.rescue import Moment, Rescue
from heterodyne.runtime.comm.agreement import Agreement
from heterodyne.runtime.data.source import DataSource
from heterodyne.runtime.liveness.slowdowns import Slowdowns
from heterodyne.runtime.records.metrics import Slower, StepRecord, Validation
from heterodyne.runtime.records.peak_memory import forget_peak_memory, peak_memory_bytes
from heterodyne.runtime.records.progress import Reporter
from heterodyne.runtime.records.run_directory import RunDirectory
from heterodyne.runtime.records.sinks import Sinks
from heterodyne.runtime.same_batch import digest, is_looked_at, require_same
from heterodyne.runtime.skipped import SkippedSteps, require_finite
from heterodyne.runtime.slices import BatchSource
from heterodyne.runtime.weights.held_state import Held
from heterodyne.text_files import write_text
from heterodyne.units import format_seconds

__all__ = ["Outcome", "StepResult", "Trainer", "TrainingWorker", "identity_of"]

_DATA = "data"
# How long what is under way may take once somebody has asked to stop
_FIRST_STEP_S, _STEP_S, _STEP_FACTOR = 600.0, 60.0, 20.0
_CHECKPOINT_S = 1800.0


def identity_of(job: Job, data: DataSource) -> dict[str, Any]:
    """What a run must agree in to continue another one: what decides its losses."""
    return {"job": job.decisive, "data": dict(data.identity)}


class StepResult(Protocol):
    """What a step says of the whole global batch; ``grad_norm`` None where this rank does not know it; ``fault`` None unless it was
    skipped.
    """

    @property
    def loss(self) -> float: ...
    @property
    def grad_norm(self) -> float | None: ...
    @property
    def fault(self) -> str | None: ...
    @property
    def slower(self) -> str | None: ...
    @property
    def overflow(self) -> bool: ...
    @property
    def lr(self) -> float: ...


class TrainingWorker(Protocol):
    """One rank's part of the training (`heterodyne.runtime.worker.Worker`); all ranks call every method alike."""

    @property
    def device(self) -> torch.device: ...
    @property
    def module(self) -> nn.Module: ...
    @property
    def borrowed_bytes(self) -> int:
        """Bytes that are resident in this process, but belong to other ranks."""

    def step(self, batch: BatchSource) -> StepResult:
        """One optimizer step on the global batch."""

    def evaluate_sum(self, batch: BatchSource) -> tuple[float, float]:
        """Sum and count of the losses of a batch of any size, without training on it."""

    def own_state(self) -> Mapping[str, Any]:
        """Model, optimizer and step: the part that this rank answers for."""

    def needs(self, keys: Sequence[str]) -> bool:
        """Whether this rank reads what these keys lead to in the state of all."""

    def not_finite(self) -> str | None:
        """The first of the trained weights and of the optimizer's state here that is not finite, None if all are."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take of the state of all what is needed here."""

    def held(self) -> Held | None:
        """The part of that state that this rank has, without asking others; None in the middle of an update."""

    def aside(self) -> AbstractContextManager[None]:
        """Around copies of what is held, in a thread beside that of the steps."""

    def weights(self) -> Mapping[str, Any]:
        """The state dict of the whole model, on rank 0."""

    @property
    def slowdowns(self) -> Slowdowns:
        """Of the ranks and links."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a run ended.

    Args:
        steps: optimizer steps that are done, those before a resume included.
        loss: of the last step; None if there was nothing left to do.
        validation_loss: the last one; None without validation.
        interrupted: somebody asked to stop before all steps were done.
        seconds: wall time of the loop.
        peak_memory_bytes: the most that each rank used, in order of rank.
    """

    steps: int
    loss: float | None
    validation_loss: float | None
    interrupted: bool
    seconds: float
    peak_memory_bytes: tuple[int, ...]


class Trainer:
    """Trains one job in one run directory.

    Args:
        worker: this rank's.
        data: training and validation samples, on every rank the same.
        job, plan: what is trained, and under which plan.
        run: where it is kept, the same directory on every rank.
        agreement: the ranks.
        reporter: shown what happens, on rank 0; silent on the others.
        ideal_samples_per_s: what the devices reach together when each computes for itself; None: efficiency is not known.
        phase: entered, with words, around what takes long and is no step (checkpoints).
    """

    def __init__(
        self,
        *,
        worker: TrainingWorker,
        data: DataSource,
        job: Job,
        plan: Plan,
        run: RunDirectory,
        agreement: Agreement,
        reporter: Reporter,
        ideal_samples_per_s: float | None = None,
        phase: Callable[[str], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        self._worker = worker
        self._data = data
        self._job = job
        self._plan = plan
        self._run = run
        self._ranks = agreement
        self._reporter = reporter
        self._ideal_samples_per_s = ideal_samples_per_s
        self._phase = phase
        self._checkpoints = Checkpoints(
            run.checkpoints, keep=job.checkpoint.keep, agreement=agreement, say=self._say_first
        )
        self._identity = identity_of(job, data)
        self._done = 0
        self._generators = (0, taken())  # the steps that were done, and what was drawn from then on
        self._rescue = Rescue(
            run.checkpoints,
            rank=agreement.rank,
            size=agreement.size,
            run=agreement.on_rank0(lambda: secrets.token_hex(8)),
            identity=self._identity,
            plan=plan.dump(),
            moment=self._moment,
            still=self._is_still,
        )
        self._saved: int | None = None
        self._failed = 0  # checkpoints in a row
        self._longest_s: float | None = None  # of a step
        self._skipped = SkippedSteps(job.training.max_skipped_steps, self._say_first)
        self._unproved: int | None = None  # a checkpoint whose weights have given no loss yet
        self._validation: Validation | None = None
        self._last: StepRecord | None = None

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
            self._restore(found)
            if same_plan:
                self._expect_speeds()
        self._say_first(f"resuming after step {self._done} from {found.path}")
        return self._done

    def _expect_speeds(self) -> None:
        def read() -> Any:
            with suppress(OSError, ValueError):
                return read_json(self._run.speeds)
            return None

        speeds = self._ranks.on_rank0(read)

        def expect() -> bool:
            with suppress(ValueError, TypeError, LookupError):
                self._worker.slowdowns.expect(speeds[self._ranks.rank])
                return True
            return False

        if not all(
            self._ranks.gather_or_raise(expect)
        ):  # all ranks look at themselves before the same steps, or none does
            self._worker.slowdowns.reset()

    def _keep_speeds(self) -> None:
        speeds = self._ranks.gather_or_raise(self._worker.slowdowns.usual)

        def write() -> None:
            with suppress(OSError):
                write_text(self._run.speeds, json.dumps(speeds))

        if all(speeds):
            self._ranks.only_on_rank0(write)

    def train(self) -> Outcome:
        """Do the steps that are left. Raises CheckpointError, DataError or WorkerError; what was written before stays readable."""
        started = time.perf_counter()
        give_back_memory()
        forget_peak_memory(self._worker.device)
        sinks = self._open_sinks()
        try:
            with orderly_stop("the beginning of training", _FIRST_STEP_S, self._say_first) as stop:
                interrupted = self._loop(stop, sinks)
                stop.begin("the last checkpoint", _CHECKPOINT_S)
                if self._saved != self._done:
                    self._skipped.require_none(self._done)
                    self._save()
                self._checkpoints.prune()
        except NumericsError as error:
            raise self._stopped(error) from error
        finally:
            if sinks is not None:
                with self._phase("finishing the trackers"):
                    sinks.close()
            self._reporter.close()
        return Outcome(
            steps=self._done,
            loss=None if self._last is None else self._last.loss,
            validation_loss=None if self._validation is None else self._validation.validation_loss,
            interrupted=interrupted,
            seconds=time.perf_counter() - started,
            peak_memory_bytes=tuple(self._ranks.gather_or_raise(self._peak_memory_bytes)),
        )

    def rescue(self) -> None:
        """Write what this rank holds of the state after the last step that was done; from any thread, also while this rank waits for
        others in a step that will not end. Whoever resumes finds it, if all ranks have written. Raises nothing.
        """
        with self._worker.aside():
            self._rescue.write()

    def export(self) -> Path:
        """Write the weights as they are now into the run's ``model/``; where they are. Raises CheckpointError."""
        with self._phase("writing the weights"):
            weights = self._worker.weights()
            return self._ranks.on_rank0(lambda: export_model(self._worker.module, self._run.model, weights))

    def _loop(self, stop: StopRequest, sinks: Sinks | None) -> bool:
        """Whether it was interrupted."""
        steps, every = self._job.training.steps, self._job.checkpoint.every
        while self._done < steps:
            longest_s = self._longest_s
            most_s = _FIRST_STEP_S if longest_s is None else max(_STEP_S, _STEP_FACTOR * longest_s)
            takes = "" if longest_s is None else f" (the longest took {format_seconds(longest_s)})"
            stop.begin(f"step {self._done + 1}{takes} with its checkpoint", most_s)
            # Asked before the step and answered after it: to ask and wait in one would make fast ranks wait for slow updates.
            stopping = self._ranks.ask(lambda: stop.number is not None)
            self._step(sinks)
            if stopping() and self._done < steps:
                stop.agree()
                asked = self._ranks.gather_or_raise(
                    lambda: None if stop.number is None else f"{stop.number.name} (pid {os.getpid()})"
                )
                self._say_first(f"{_got(asked)}stopping after step {self._done}, as asked")
                return True
            if self._validation_is_due():
                stop.begin("the validation", _CHECKPOINT_S)
                self._validate(sinks)
            if every and self._done % every == 0 and not self._skipped.in_a_row:
                stop.begin(f"the checkpoint of step {self._done}", _CHECKPOINT_S)
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

    def _stopped(self, error: NumericsError) -> NumericsError:
        """The same error, which says what is left; a checkpoint of weights that have given no finite loss is not it."""
        if self._unproved is not None:
            self._checkpoints.set_aside(self._unproved)
        found = self._checkpoints.latest()
        left = (
            "There is no checkpoint"
            if found is None
            else f"The newest checkpoint is of step {found.step}: change that and use --resume"
        )
        told = NumericsError(f"{error}. {left}")
        told.shared = True
        return told

    def _moment(self) -> Moment | None:
        done, generators = self._generators
        held = self._worker.held()
        if held is None or held.state["step"] != done:
            return None
        return Moment(step=done, held=held, random=random_state(generators))

    def _is_still(self, moment: Moment) -> bool:
        return self._worker.held() is not None and self._generators[0] == moment.step

    def _peak_memory_bytes(self) -> int:
        return peak_memory_bytes(self._worker.device) - self._worker.borrowed_bytes

    def _step(self, sinks: Sinks | None) -> None:
        started = time.perf_counter()
        self._generators = (self._done, taken())
        batch = self._data.batch(self._done)
        if self._ranks.size > 1 and is_looked_at(self._done):
            require_same(self._ranks.gather_or_raise(lambda: digest(batch)), self._done, given=False)
        result = self._worker.step(batch)
        step_s = time.perf_counter() - started
        self._longest_s = max(step_s, self._longest_s or 0.0)
        self._done += 1
        self._generators = (self._done, taken())
        samples_per_s = self._data.batch_size / step_s
        ideal, length = self._ideal_samples_per_s, self._data.sequence_length
        record = StepRecord(
            step=self._done,
            loss=result.loss,
            grad_norm=result.grad_norm,
            lr=result.lr,
            step_s=step_s,
            samples_per_s=samples_per_s,
            tokens_per_s=None if length is None else samples_per_s * length,
            efficiency=samples_per_s / ideal if ideal else None,
            memory_bytes=self._peak_memory_bytes(),
            time_s=time.time(),
        )
        self._last = record
        due = self._done % self._job.metrics.every == 0 or self._done == self._job.training.steps
        if due and sinks is not None:
            sinks.write(record)
        if result.slower is not None:
            self._reporter.slower = result.slower
            if result.slower:
                self._say_first("another plan may be faster now: Ctrl-C, and go on with --resume --replan")
            if sinks is not None:
                sinks.write(Slower(step=self._done, slower=result.slower, time_s=time.time()))
        self._reporter.step(record)
        self._skipped.note(self._done, result.fault, overflow=result.overflow)
        if result.fault is None and self._unproved is not None:
            self._unproved = None
            self._checkpoints.prune()

    def _validation_is_due(self) -> bool:
        every = self._job.training.validate_every
        return self._done == self._job.training.steps or (every > 0 and self._done % every == 0)

    def _validate(self, sinks: Sinks | None) -> None:
        batches = self._data.validation_batches(self._job.training.validation_samples)
        if not batches:
            return
        with self._phase("validating"):
            sums, counts = zip(*(self._worker.evaluate_sum(batch) for batch in batches), strict=True)
        loss = math.fsum(sums) / math.fsum(counts)
        self._validation = Validation(step=self._done, validation_loss=loss, time_s=time.time())
        if sinks is not None:
            sinks.write(self._validation)
        self._reporter.validation(self._validation)

    def _save(self) -> None:
        with self._phase("writing a checkpoint"):
            require_finite(self._ranks.gather_or_raise(self._worker.not_finite), self._done)
            state = dict(self._worker.own_state())
            read = self._data.state_dict()
            if read is not None:
                state[_DATA] = read
            self._checkpoints.save(self._done, state, identity=self._identity, plan=self._plan.dump())
        self._saved = self._unproved = self._done
        self._keep_speeds()

    def _restore(self, found: Checkpoint) -> None:
        restored = self._checkpoints.load(found, identity=self._identity, wanted=self._wanted)
        with taken_from(f"{found.path} holds a state", "resume from an earlier one by moving it away"):
            state = dict(restored.state)
            read = state.pop(_DATA, None)
            if read is not None:
                self._data.load_state_dict(read)
            self._worker.load_state_dict(state)
            self._require_finite(restored.step)
            if restored.random is not None:
                restore_random_state(restored.random)
        self._done = self._saved = self._unproved = restored.step
        self._generators = (self._done, taken())

    def _require_finite(self, step: int) -> None:
        """Raises CheckpointError, on every rank, for a state that no run of this library has written."""
        found = next((name for name in self._ranks.gather_or_raise(self._worker.not_finite) if name is not None), None)
        if found is not None:
            self._checkpoints.set_aside(step)
            raise CheckpointError(
                f"{found} is not finite in the checkpoint of step {step}, which no run writes: it was set aside; resume again from an "
                "earlier one"
            )

    def _wanted(self, keys: Sequence[str]) -> bool:
        return keys[0] == _DATA or self._worker.needs(keys)

    def _open_sinks(self) -> Sinks | None:
        """On rank 0; an error there is every rank's."""
        return self._ranks.only_on_rank0(self._open_sinks_here)

    def _open_sinks_here(self) -> Sinks:
        return Sinks.open(
            self._run,
            self._job.metrics.wanted,
            done=self._done,
            config=self._job.model_dump(mode="json", exclude_none=True),
            flush_s=self._job.metrics.flush_s,
            say=self._reporter.say,
        )

    def _say_first(self, text: str) -> None:
        if self._ranks.rank == 0:
            self._reporter.say(text)


def _got(asked: Sequence[str | None]) -> str:
    """Which ranks were sent a signal, where it was not all of them, as a launcher does."""
    sent = [f"rank {rank} got {signal}" for rank, signal in enumerate(asked) if signal is not None]
    return f"{', '.join(sent)}: " if len(sent) < len(asked) else ""

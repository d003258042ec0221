"""The training engine of one rank: steps that the ranks make together, what is written of them, checkpoints, and rescues.

A job (`heterodyne.runtime.trainer`) and a loop of one's own (`heterodyne.api.distributed`) stand on it: what one has, both have.
"""

from __future__ import annotations

import json
import os
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from heterodyne.errors import CheckpointError, NumericsError
from heterodyne.job import TrainingSection
from heterodyne.json_files import read_json
from heterodyne.plan.order import is_asynchronous
from heterodyne.plan.plan import Plan
from heterodyne.plan.schedules.asynchronous import INEXACT
from heterodyne.processes.heap import give_back_memory
from heterodyne.processes.signals import StopRequest
from heterodyne.runtime.checkpoint.checkpoints import Checkpoints, taken_from
from heterodyne.runtime.checkpoint.found import Checkpoint
from heterodyne.runtime.checkpoint.random_state import random_state, restore_random_state, taken
from heterodyne.runtime.checkpoint.registered import Registered
from heterodyne.runtime.checkpoint.rescue import Moment, Rescue
from heterodyne.runtime.checkpoint.state_names import StateNames
from heterodyne.runtime.comm.agreement import Agreement
from heterodyne.runtime.records.peak_memory import forget_peak_memory, peak_memory_bytes
from heterodyne.runtime.records.run_records import RunRecords
from heterodyne.runtime.same_batch import digest, is_looked_at, require_same
from heterodyne.runtime.sites.sites import Sites
from heterodyne.runtime.skipped import SkippedSteps, require_finite
from heterodyne.runtime.slices import BatchSource, is_source
from heterodyne.runtime.step_result import StepResult
from heterodyne.runtime.weights.between_steps import require_alike
from heterodyne.runtime.worker import Worker
from heterodyne.text_files import write_text

__all__ = ["DATA", "EXTRA", "Engine", "Outcome"]

DATA, EXTRA, REGISTERED, SITES = "data", "extra", "registered", "sites"
"""Entries of a checkpoint that are not the worker's: the position in the data of a job; ``extra`` and registered objects of a loop; what
rank 0 keeps of outer steps with other sites."""

Batch = Mapping[str, Tensor] | BatchSource
_ENDS_S = 2.0
"""That a device may take to end its last step where a run breaks off."""


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


@dataclass(frozen=True)
class _Done:
    """A step that was done, the last of ``done``. ``seconds``: with the reading of its batch; ``memory_bytes``: at most, until then."""

    result: StepResult
    _: KW_ONLY
    done: int
    seconds: float
    memory_bytes: int

    @property
    def has_ended(self) -> bool:
        """Whether the device has ended it."""
        return not self.result.is_late or (self.result.late is not None and self.result.late.has_come)


class Engine:
    """Trains with one worker. Every rank calls every method, in the same order, but for `rescue`.

    Args:
        worker: this rank's.
        agreement: the ranks.
        plan: that the worker obeys.
        identity: what a run must agree in to continue this one.
        records: what is written of the steps; opened here, on rank 0.
        say: takes lines for people, from rank 0.
        names: those of states in checkpoints.
        most_skipped: so many steps in a row may be skipped.
        phase: entered, with words, around what takes long and is no step (checkpoints).
        sites: the outer steps with other sites; None: there are none.
    """

    def __init__(
        self,
        *,
        worker: Worker,
        agreement: Agreement,
        plan: Plan,
        identity: Mapping[str, Any],
        records: RunRecords,
        say: Callable[[str], None],
        names: StateNames | None = None,
        most_skipped: int = TrainingSection().max_skipped_steps,
        phase: Callable[[str], AbstractContextManager[Any]] = nullcontext,
        sites: Sites | None = None,
    ) -> None:
        self._worker = worker
        self._sites = sites
        self._ranks = agreement
        self._plan = plan.dump()
        self._inexact = is_asynchronous(plan)
        self._identity = dict(identity)
        self._records = records
        self._say = say
        self._names = names or StateNames(wrapped=False)
        self._phase = phase
        self._begun = False
        self._started_s = time.perf_counter()
        self._generators = (worker.steps_done, taken())  # the steps that were done, and what was drawn from then on
        self._skipped = SkippedSteps(most_skipped, say)
        self._unproved: tuple[Checkpoints, int] | None = None  # a checkpoint whose weights have given no loss yet
        self._checkpoints: Checkpoints | None = None  # the latest that were written or read
        self.registered = Registered()
        """Objects of the script whose state checkpoints keep."""
        self._extra = False  # scripts keep something in checkpoints that nobody else knows
        self._stopping: Callable[[], bool] = lambda: False
        self._unnoted: _Done | None = None  # the last step, until the device has decided it
        self._last: StepResult | None = None
        self._validation: float | None = None
        self.longest_s: float | None = None
        """Seconds of the longest step."""
        run = records.run
        self._rescue = None if run is None else self._rescue_in(run.checkpoints)

    @property
    def done(self) -> int:
        """Optimizer steps that are done, those before a resume included."""
        return self._worker.steps_done

    @property
    def skips(self) -> bool:
        """Whether the last step was skipped."""
        self._note_last()
        return bool(self._skipped.in_a_row)

    def begin(self) -> None:
        """Forget what memory was used before training, and open the records; the first step does so too."""
        if self._begun:
            return
        self._begun = True
        self._started_s = time.perf_counter()
        give_back_memory()
        forget_peak_memory(self._worker.device)
        self._ranks.only_on_rank0(lambda: self._records.open(self.done))
        if self._inexact:
            self._say(INEXACT)
        if self._sites is not None:
            self._sites.begin()
            self._note_outer(self._sites)

    def step(self, read: Callable[[], Batch], stop: StopRequest | None = None) -> StepResult:
        """Train on the batch that ``read`` gives. With ``stop`` the ranks ask each other whether to stop after it: see `stopping`.

        Raises DataError if the ranks have other batches, PlanError if they have other weights, NumericsError if too many steps in a row
        were skipped.
        """
        self.begin()
        started_s = time.perf_counter()
        self._mark()
        if self._rescue is not None:
            self.registered.begin()
        batch = read()
        if self._ranks.size > 1 and is_looked_at(self.done):
            sample = self._worker.state.sample()
            of_all = self._ranks.gather_or_raise(lambda: (digest(batch), sample))
            require_same([of for of, _ in of_all], self.done, given=not is_source(batch))
            require_alike([of for _, of in of_all], self.done)
        # Asked before the step and answered after it: to ask and wait in one would make fast ranks wait for slow updates.
        self._stopping = (lambda: False) if stop is None else self._ranks.ask(lambda: stop.number is not None)
        result = self._worker.step(batch) if self._sites is None else self._sites.step(batch)
        seconds = time.perf_counter() - started_s
        self.longest_s = max(seconds, self.longest_s or 0.0)
        self._mark()
        if self._rescue is not None:
            self.registered.end()
        self._last = result
        self._note_last()
        memory_bytes = self._peak_memory_bytes() if self._writes else 0
        self._unnoted = _Done(result, done=self.done, seconds=seconds, memory_bytes=memory_bytes)
        if not result.is_late:  # else it is all there when the next step is done
            self._note_last()
        if self._sites is not None:
            self._sites.after(result)
            self._note_outer(self._sites)
        return result

    @property
    def _writes(self) -> bool:
        return self._ranks.rank == 0 and self._records.run is not None

    def _note_last(self) -> None:
        """Write down what the last step came to, if that is not done yet. Raises NumericsError if too many in a row were skipped."""
        step, self._unnoted = self._unnoted, None
        if step is None:
            return
        if self._writes:
            self._records.step(step.result, done=step.done, seconds=step.seconds, memory_bytes=step.memory_bytes)
        try:
            self._skipped.note(step.done, step.result.fault, overflow=step.result.overflow)
        except NumericsError as error:
            raise self._stopped(error) from error
        if step.result.fault is None:
            self.prune()

    def _note_outer(self, sites: Sites) -> None:
        for line in sites.notes():
            self._records.outer(line)

    def _note_in_time(self) -> None:
        """Write down the last step where a run breaks off, if the device ends it in a moment; others may not take part any more."""
        until = time.monotonic() + _ENDS_S
        while (step := self._unnoted) is not None and not step.has_ended and time.monotonic() < until:
            time.sleep(0.01)
        if step is not None and step.has_ended:
            with suppress(Exception):  # the run ends of something else
                self._note_last()

    def stopping(self, stop: StopRequest) -> bool:
        """Return whether any rank was asked to stop before the last step; they are named then. To be asked once after each step."""
        if not self._stopping():
            return False
        self._stopping = lambda: False
        stop.agree()
        asked = self._ranks.gather_or_raise(
            lambda: None if stop.number is None else f"{stop.number.name} (pid {os.getpid()})"
        )
        self._say(f"{_got(asked)}stopping after step {self.done}, as asked")
        return True

    def validated(self, loss: float) -> None:
        """Keep the loss of a validation."""
        self.begin()
        self._note_last()
        self._validation = loss
        if self._ranks.rank == 0:
            self._records.validation(loss, done=self.done)

    def save(self, checkpoints: Checkpoints, beside: Mapping[str, Any]) -> Path:
        """Write a checkpoint of the worker's state and of the entries ``beside`` it (`DATA`, `EXTRA`). Older ones stay until a step has had
        a finite loss with these weights.

        Raises CheckpointError if a rank cannot write, NumericsError if the last step was skipped or the state is not finite.
        """
        with self._phase("writing a checkpoint"):
            self._worker.state.finish()
            self._note_last()
            try:
                self._skipped.require_none(self.done)
                require_finite(self._ranks.gather_or_raise(self._worker.not_finite), self.done)
            except NumericsError as error:
                raise self._stopped(error) from error
            objects = self.registered.state()
            if self._sites is not None:
                self._sites.settle()
                self._note_outer(self._sites)
                beside = {**beside, SITES: self._sites.state_dict()}
            state = {
                **self._names.own_state(self._worker.state.own()),
                **({REGISTERED: objects} if objects else {}),
                **beside,
            }
            path = checkpoints.save(self.done, state, identity=self._identity, plan=self._plan)
            self._keep_speeds()
        self._checkpoints, self._unproved = checkpoints, (checkpoints, self.done)
        self._extra = EXTRA in beside
        return path

    def restore(self, checkpoints: Checkpoints, found: Checkpoint, *, same_plan: bool) -> dict[str, Any]:
        """Load a checkpoint and return its entries beside the worker's state. ``same_plan``: steps should take as long as before.

        Raises CheckpointError if it is of another run, or holds what no run writes.
        """
        restored = checkpoints.load(found, identity=self._identity, wanted=self._wanted)
        with taken_from(f"{found.path} holds a state", "resume from an earlier one by moving it away"):
            state = dict(restored.state)
            beside = {key: state.pop(key) for key in (DATA, EXTRA) if key in state}
            objects = state.pop(REGISTERED, {})
            if self._sites is not None:
                self._sites.load_state_dict(state.pop(SITES, {}))
            self._worker.state.load_state_dict(self._names.captured_state(state))
            wrong = next(
                (name for name in self._ranks.gather_or_raise(self._worker.not_finite) if name is not None), None
            )
            if wrong is not None:
                checkpoints.set_aside(restored.step)
                raise CheckpointError(
                    f"{wrong} is not finite in the checkpoint of step {restored.step}, which no run writes: it was set aside; resume again "
                    "from an earlier one"
                )
            self.registered.load(objects)
            if restored.random is not None:
                restore_random_state(restored.random)
        self._checkpoints, self._unproved = checkpoints, (checkpoints, restored.step)
        self._extra = EXTRA in beside
        self._mark()
        if same_plan:
            self._expect_speeds()
        return beside

    def prune(self) -> None:
        """Let go of the oldest checkpoints, where the weights of the newest have given a loss or there are no more steps to do."""
        self._note_last()
        if self._unproved is not None:
            checkpoints, _ = self._unproved
            self._unproved = None
            checkpoints.prune()

    def rescue(self) -> None:
        """Write what this rank holds of the state after the last step that was done; from any thread, also while this rank waits for
        others in a step that will not end. Whoever resumes finds it, if all ranks have written. Raises nothing.
        """
        if self._rescue is not None:
            with self._worker.state.aside():
                self._rescue.write()
            self._note_in_time()

    def outcome(self, *, interrupted: bool) -> Outcome:
        self._note_last()
        return Outcome(
            steps=self.done,
            loss=None if self._last is None else self._last.loss,
            validation_loss=self._validation,
            interrupted=interrupted,
            seconds=time.perf_counter() - self._started_s,
            peak_memory_bytes=tuple(self._ranks.gather_or_raise(self._peak_memory_bytes)),
        )

    def close(self) -> None:
        """End the records. On any rank, also where the others do not come any more."""
        self._note_in_time()
        if self._sites is not None:
            self._sites.close()
        self._records.close()

    def _stopped(self, error: NumericsError) -> NumericsError:
        """The same error, which says what is left; a checkpoint of weights that have given no finite loss is not it."""
        if self._unproved is not None:
            checkpoints, step = self._unproved
            checkpoints.set_aside(step)
        found = None if self._checkpoints is None else self._checkpoints.latest()
        left = (
            "There is no checkpoint"
            if found is None
            else f"The newest checkpoint is of step {found.step}: change that and resume from it (--resume; load_checkpoint() in a loop)"
        )
        told = NumericsError(f"{error}. {left}")
        told.shared = True
        return told

    def _rescue_in(self, directory: Path) -> Rescue:
        return Rescue(
            directory,
            rank=self._ranks.rank,
            size=self._ranks.size,
            run=self._ranks.on_rank0(lambda: secrets.token_hex(8)),
            identity=self._identity,
            plan=self._plan,
            moment=self._moment,
            still=self._is_still,
        )

    def _mark(self) -> None:
        """Keep what is drawn from now on, for a rescue."""
        if self._rescue is not None:
            self._generators = (self.done, taken())

    def _moment(self) -> Moment | None:
        done, generators = self._generators
        objects = None if self._extra else self.registered.after_last_step()
        held = None if objects is None else self._worker.state.held()
        if held is None or held["step"] != done:
            return None
        state = {**self._names.own_state(held), **({REGISTERED: objects} if objects else {})}
        return Moment(step=done, state=state, random=random_state(generators))

    def _is_still(self, moment: Moment) -> bool:
        return self._worker.state.held() is not None and self._generators[0] == moment.step

    def _expect_speeds(self) -> None:
        def read() -> Any:
            with suppress(OSError, ValueError):
                return None if self._records.run is None else read_json(self._records.run.speeds)
            return None

        speeds = self._ranks.on_rank0(read)

        def expect() -> bool:
            with suppress(ValueError, TypeError, LookupError):
                self._worker.slowdowns.expect(speeds[self._ranks.rank])
                return True
            return False

        if not all(self._ranks.gather_or_raise(expect)):
            self._worker.slowdowns.reset()  # all ranks look at themselves before the same steps, or none does

    def _keep_speeds(self) -> None:
        run = self._records.run
        if run is None:
            return
        speeds = self._ranks.gather_or_raise(self._worker.slowdowns.usual)

        def write() -> None:
            with suppress(OSError):
                write_text(run.speeds, json.dumps(speeds))

        if all(speeds):
            self._ranks.only_on_rank0(write)

    def _wanted(self, keys: Sequence[str]) -> bool:
        if keys[0] == SITES:
            return self._ranks.rank == 0
        return keys[0] in (DATA, EXTRA, REGISTERED) or self._worker.state.needs(self._names.captured_keys(tuple(keys)))

    def _peak_memory_bytes(self) -> int:
        return peak_memory_bytes(self._worker.device) - self._worker.borrowed_bytes


def _got(asked: Sequence[str | None]) -> str:
    """Which ranks were sent a signal, where it was not all of them, as a launcher does."""
    sent = [f"rank {rank} got {signal}" for rank, signal in enumerate(asked) if signal is not None]
    return f"{', '.join(sent)}: " if len(sent) < len(asked) else ""

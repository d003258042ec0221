"""``heterodyne train`` as its own launcher: workers whose memory ends are started again, to go on under another plan."""

from __future__ import annotations

import os
import re
import secrets
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from heterodyne.api.workers import command_of, run_workers, workers_here
from heterodyne.cluster.written import read_cluster
from heterodyne.errors import HeterodyneError, OutOfMemoryError
from heterodyne.plan.plan import Plan
from heterodyne.processes import OUT_OF_MEMORY, shell_status, to_standard_error
from heterodyne.run_directory import RUNS, RunDirectory
from heterodyne.runtime.records.shortages import Shortage, note_shortage, read_shortages
from heterodyne.runtime.rendezvous.environment import WorkerEnvironment

__all__ = ["KernelKills", "Training", "train_here"]

_IN_VAIN = 4  # plans in a row that come no further


@dataclass(frozen=True, kw_only=True)
class Training:
    """What ``heterodyne train`` was asked for. ``restarted``: by a launcher, after a try that has failed."""

    job: Path
    cluster: Path | None
    plan: Path | None
    run_dir: Path | None
    resume: bool
    overrides: tuple[str, ...]
    on_out_of_memory: Literal["replan", "stop"]
    replan: bool = False
    restarted: bool = False

    @property
    def arguments(self) -> list[str]:
        options = {"--cluster": self.cluster, "--plan": self.plan, "--run-dir": self.run_dir}
        given = [word for option, value in options.items() if value is not None for word in (option, str(value))]
        sets = [word for value in self.overrides for word in ("--set", value)]
        return [
            "train",
            str(self.job),
            *(["--resume"] if self.resume else []),
            *(["--replan"] if self.replan else []),
            *sets,
            *given,
        ]

    @property
    def again(self) -> Training:
        """To go on where it has ended. A plan that was given is the one that did not fit."""
        return replace(self, resume=True, plan=None, replan=False)


def train_here(training: Training, train: Callable[[Training], int]) -> int:
    """Train as often as it takes; the exit status. ``train`` does it in this process, as one worker or as the only one.

    Where nobody has started this process as a worker, it starts one a device of this machine. Raises OutOfMemoryError if this process
    trains, and is not to go on.
    """
    environment = WorkerEnvironment.read()
    if environment is not None:
        return train(replace(training, restarted=environment.attempt > 0))
    count = workers_here(training.cluster)
    if training.run_dir is not None:
        return _alone(training, train) if count is None else _on_workers(training, count)
    name = training.job.stem
    run = RunDirectory.latest(RUNS, name) if training.resume else RunDirectory.create_next(RUNS, name)
    training = replace(training, run_dir=run.path)
    try:
        return _alone(training, train) if count is None else _on_workers(training, count)
    finally:
        with suppress(OSError):  # it is not empty: the run has begun
            run.path.rmdir()


def _on_workers(training: Training, count: int) -> int:
    assert training.run_dir is not None
    while True:
        kills = KernelKills(RunDirectory(training.run_dir))
        status = run_workers(count, training.arguments, kills.explain)
        lacked = status == OUT_OF_MEMORY or (status == shell_status(-signal.SIGKILL) and kills.noted)
        if not lacked or not _goes_on(training, to_standard_error):
            return status
        training = training.again


def _alone(training: Training, train: Callable[[Training], int]) -> int:
    """This process becomes another one, with all memory free, to go on under another plan."""
    try:
        return train(training)
    except OutOfMemoryError as error:
        to_standard_error(f"error: {error}")
        if not _goes_on(training, to_standard_error):
            return OUT_OF_MEMORY
    command = command_of(training.again.arguments)
    sys.stdout.flush()
    return os.execv(command[0], command)


def _goes_on(training: Training, say: Callable[[str], None]) -> bool:
    """Return whether to plan once more; what for, or why not, is printed. Not where nothing is known of what was lacked."""
    assert training.run_dir is not None
    shortages = read_shortages(RunDirectory(training.run_dir).shortages)
    if training.on_out_of_memory == "stop" or not shortages:
        return False
    tries = [[s for s in shortages if s.attempt == attempt] for attempt in dict.fromkeys(s.attempt for s in shortages)]
    lacked = "; ".join(map(str, tries[-1]))
    in_vain = _in_vain(tries)
    if in_vain <= _IN_VAIN:
        say(f"heterodyne: planning again with less memory: {lacked}.")
        return True
    say(
        f"heterodyne: {in_vain} plans in a row have run out of memory, none has done a step more, so the run ends. What was lacked last: "
        f"{lacked}. What helps: free what others hold of that device, leave it out of the cluster file, or state less memory for it there "
        "(`memory:`); then go on with --resume."
    )
    return False


def _in_vain(tries: Sequence[Sequence[Shortage]]) -> int:
    """Return how many of the last tries have come no further than one before."""
    furthest, count = -2, 0
    for each in tries:
        step = max(-1 if s.step is None else s.step for s in each)
        furthest, count = (step, 1) if step > furthest else (furthest, count + 1)
    return count


_COUNTS = Path("/proc/vmstat")
_KILLED = re.compile(r"^oom_kill (\d+)$", re.MULTILINE)


class KernelKills:
    """Counted from here on. ``noted``: a worker of the run was among the killed, and what it lacked is in the run directory."""

    def __init__(self, run: RunDirectory, counts: Path = _COUNTS) -> None:
        self._run = run
        self._counts = counts
        self._before = self._count()
        self.noted = False

    def explain(self, rank: int) -> str | None:
        """Say that the kernel has killed for want of memory since, where it has; ``rank`` has failed."""
        if self._count() == self._before:
            return None
        with suppress(HeterodyneError, OSError, ValueError, IndexError):  # the run may have had no plan yet
            self.noted = self._note(rank)
        return "the kernel has killed a process for want of memory"

    def _note(self, rank: int) -> bool:
        """Return whether it was known what the plan asked of this rank's device."""
        plan, device = Plan.load(self._run.plan), read_cluster(self._run.cluster).devices[rank].id
        predicted = 0 if plan.predicted is None else plan.predicted.memory_bytes.get(device, 0)
        if not predicted:
            return False
        # How much it had is not known; so much is: it was not enough for this plan.
        shortage = Shortage(
            device=device,
            rank=rank,
            step=None,
            where="a step, in which the kernel killed it",
            used_bytes=predicted - 1,
            asked_bytes=1,
            free_bytes=0,
            predicted_bytes=predicted,
            longer=False,
            attempt=secrets.token_hex(4),
        )
        note_shortage(self._run.shortages, shortage)
        return True

    def _count(self) -> int:
        try:
            found = _KILLED.search(self._counts.read_text())
        except OSError:
            return 0
        return int(found[1]) if found else 0

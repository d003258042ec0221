"""Start one process a rank on this machine, watch them, and end them all when one fails or somebody says stop.

The workers get the environment that `torchrun` gives, so any program that runs under it runs under this. It is meant for
one machine: for several, use torchrun, Slurm or Ray, which the workers understand as well.
"""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from heterodyne.errors import WorkerError
from heterodyne.printable import printable
from heterodyne.processes.guardian import guarded, kill_marked
from heterodyne.processes.logs import temporary_logs
from heterodyne.processes.mark import marked_environment, new_mark
from heterodyne.processes.parent import VARIABLE, LauncherEnd
from heterodyne.processes.port import reserve_port
from heterodyne.processes.signals import StopRequest, stop_requests
from heterodyne.processes.status import GAVE_UP_ON_A_PEER, OUT_OF_MEMORY, STOPPED, TOLD, describe_exit, shell_status
from heterodyne.secret_names import SECRET_VARIABLE

__all__ = ["WorkerSpec", "launch_workers", "most_workers", "to_standard_error"]

_WORKERS_PER_CORE = 32
_WORKER_BYTES = 2**27  # resident, once torch is loaded
_POLL_S = 0.05
_CULPRIT_S = 4.0  # how long the failure of a worker that blames another may wait for that other one's own end
_TOLD_S = (
    10.0  # how long rank 0 may take to tell an error that others have told: it ends last, because it keeps the store
)
_MOST_PATIENCE = 5.0  # times these two, on a busy machine
_TAIL_LINES = 20
_TAIL_BYTES = 16_384


def most_workers() -> int:
    """Return how many workers a machine is given: more would only wait for each other, or for memory."""
    return max(1, min(_WORKERS_PER_CORE * (os.cpu_count() or 1), psutil.virtual_memory().total // _WORKER_BYTES))


def to_standard_error(line: str) -> None:
    sys.stderr.write(f"{printable(line)}\n")
    sys.stderr.flush()


def _unexplained() -> str | None:
    return None


@dataclass(frozen=True, kw_only=True)
class WorkerSpec:
    """What one rank runs.

    Args:
        command: the program and its arguments.
        environment: variables on top of the launcher's own and of those of torchrun; these win.
        on_start: called with the process id as soon as the process exists.
        explain: called after an unsuccessful end; says why, if something outside the worker knows (a memory limit).
    """

    command: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    on_start: Callable[[int], None] | None = None
    explain: Callable[[], str | None] = _unexplained


@dataclass(kw_only=True)
class _Worker:
    rank: int
    spec: WorkerSpec
    process: subprocess.Popen[bytes]
    log: Path | None
    line: LauncherEnd

    @property
    def returncode(self) -> int | None:
        code = self.process.poll()
        return GAVE_UP_ON_A_PEER if code == 1 and self.line.blames_another else code


def launch_workers(
    specs: Sequence[WorkerSpec],
    *,
    logs: Path | None = None,
    grace_s: float = 5.0,
    interrupt_grace_s: float = 15.0,
    say: Callable[[str], None] = to_standard_error,
) -> int:
    """Run one process for each spec, rank by rank, until all have ended; return the exit status of the whole.

    Rank 0 has the terminal; what rank N writes goes to ``logs/rank-N.log``. Each worker leads a session of its own. When
    one ends unsuccessfully, the others get SIGTERM and, `grace_s` later, SIGKILL, with everything that they started.
    Ctrl-C and SIGTERM are passed on and waited for (`interrupt_grace_s`, and as long as a worker says that it finishes something first); a
    second one ends them at once. If the launcher itself is killed, its workers die with it. Each worker computes with one thread unless
    OMP_NUM_THREADS says otherwise.

    Args:
        specs: one for each rank.
        logs: where the logs go; None: a temporary directory, which stays only if the run fails, and then until some more runs have.
        say: takes each line for people.

    Returns:
        0 if all ended with 0; else the status of the worker that failed first (128 + N if signal N killed it);
        130 after Ctrl-C, 143 after SIGTERM.

    Raises:
        WorkerError: a command cannot be started.
    """
    mark, secret = new_mark(), secrets.token_hex(32)
    with ExitStack() as stack:
        directory = stack.enter_context(temporary_logs()) if logs is None else logs
        directory.mkdir(parents=True, exist_ok=True)
        stop = stack.enter_context(stop_requests())
        port = stack.enter_context(reserve_port())
        stack.enter_context(guarded(mark))
        workers: list[_Worker] = []
        try:
            for rank, spec in enumerate(specs):
                environment = _environment(rank, len(specs), port, mark, secret, spec)
                workers.append(_start(rank, spec, environment, directory))
            status, told = _wait(workers, stop, say, grace_s=grace_s, interrupt_grace_s=interrupt_grace_s)
        finally:
            _kill(workers, mark)
        if logs is None and not told:
            shutil.rmtree(directory, ignore_errors=True)
        return status


def _environment(rank: int, world_size: int, port: int, mark: str, secret: str, spec: WorkerSpec) -> dict[str, str]:
    """The environment of one worker: that of the launcher, then torchrun's variables, then the spec's own."""
    inherited = {key: value for key, value in os.environ.items() if not key.startswith("TORCHELASTIC_")}
    torchrun = {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "ROLE_RANK": str(rank),
        "GROUP_RANK": "0",
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "ROLE_WORLD_SIZE": str(world_size),
        "GROUP_WORLD_SIZE": "1",
        "ROLE_NAME": "default",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    # The level hides warnings of torch's network code about peers that end, which are told once and in words.
    defaults = {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"} | _loopback()
    defaults["PYTHONHASHSEED"] = "0"  # a model may be built in the order of a set of words
    defaults[SECRET_VARIABLE] = secret  # with which the workers know each other
    return marked_environment(mark, defaults | inherited | torchrun | dict(spec.environment))


def _loopback() -> dict[str, str]:
    """gloo would ask what the host name resolves to, which on a laptop is often a network that is not there now."""
    names = [name for _, name in socket.if_nameindex() if name in {"lo", "lo0"}]
    return {"GLOO_SOCKET_IFNAME": names[0]} if names else {}


def _start(rank: int, spec: WorkerSpec, environment: Mapping[str, str], logs: Path) -> _Worker:
    log = None if rank == 0 else logs / f"rank-{rank}.log"
    line = LauncherEnd()
    with ExitStack() as stack:
        stack.enter_context(line.worker)
        output = None if log is None else stack.enter_context(log.open("wb"))
        try:
            process = subprocess.Popen(
                spec.command,
                env={**environment, VARIABLE: line.variable},
                pass_fds=(line.worker.fileno(),),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=None if output is None else subprocess.STDOUT,
                start_new_session=True,
            )
        except OSError as error:
            line.close()
            raise WorkerError(f"rank {rank}: {spec.command[0]!r} cannot be started: {error.strerror}") from error
    worker = _Worker(rank=rank, spec=spec, process=process, log=log, line=line)
    if spec.on_start is not None:
        spec.on_start(process.pid)
    return worker


def _wait(
    workers: Sequence[_Worker],
    stop: StopRequest,
    say: Callable[[str], None],
    *,
    grace_s: float,
    interrupt_grace_s: float,
) -> tuple[int, bool]:
    """The exit status of the whole, and whether people were pointed to a log."""
    while True:
        if stop.number is not None:
            return _pass_on(workers, stop, say, grace_s=interrupt_grace_s), False
        codes = [worker.returncode for worker in workers]
        if any(codes):
            if _stopped_in_order(workers, stop, interrupt_grace_s):
                return STOPPED, False
            break
        if all(code == 0 for code in codes):
            return 0, False
        time.sleep(_POLL_S)
    culprit = _culprit(workers, first=[worker.rank for worker, code in zip(workers, codes, strict=True) if code])
    status = culprit.returncode or 0
    remaining = [worker for worker in workers if worker.returncode is None]
    _signal(remaining, signal.SIGTERM)
    _wait_for(remaining, grace_s, lambda: False, promised=False)
    # Its message is what the user should read, and rank 0 has shown it already, as its own or as that of a peer.
    told = status in (TOLD, OUT_OF_MEMORY) and (culprit.rank == 0 or workers[0].returncode == GAVE_UP_ON_A_PEER)
    if not told:
        say(_report(culprit, status, remaining))
    return shell_status(status), not told


def _stopped_in_order(workers: Sequence[_Worker], stop: StopRequest, seconds: float) -> bool:
    """Return whether all end because somebody asked one of them to stop; rank 0 has said whom. It may still have a report to write."""

    def differs() -> bool:
        return any(worker.returncode not in (None, 0, STOPPED) for worker in workers) or stop.number is not None

    return not differs() and _wait_for(workers, seconds, differs) and not differs()


def _culprit(workers: Sequence[_Worker], first: Collection[int]) -> _Worker:
    """The worker that failed of itself; if all that failed blame another, wait a moment for the other's own end.

    ``first``: the ranks that had failed when the first failure was seen. A worker that a signal has ended is the cause before those
    that miss it, and one that aborted itself (SIGABRT, as libraries do that lose a peer) only if there is no other.
    An error that is printed (a mistake in a file, say) is often every rank's: then rank 0, which has the terminal, gets time to tell it.
    """
    until, until_told = (time.monotonic() + _patience_s(seconds) for seconds in (_CULPRIT_S, _TOLD_S))
    while True:
        failed = [worker for worker in workers if worker.returncode]
        own_fault = [worker for worker in failed if worker.returncode != GAVE_UP_ON_A_PEER]
        told = bool(own_fault) and all(worker.returncode == TOLD for worker in own_fault)
        if own_fault and not (told and workers[0].returncode is None and time.monotonic() < until_told):
            return min(
                own_fault,
                key=lambda worker: (
                    (worker.returncode or 0) > 0,
                    (worker.returncode or 0) < 0 and worker.rank not in first,
                    worker.returncode == -signal.SIGABRT,
                    worker.rank,
                ),
            )
        ended = all(worker.returncode is not None for worker in workers)
        if not own_fault and (time.monotonic() > until or ended):
            return failed[0]
        time.sleep(_POLL_S)


def _patience_s(seconds: float) -> float:
    """Return how long that may take on this machine now: longer where more processes want to run than it has cores."""
    waiting = os.getloadavg()[0] / (os.cpu_count() or 1)
    return seconds * min(max(1.0, waiting), _MOST_PATIENCE)


def _report(culprit: _Worker, returncode: int, others: Sequence[_Worker]) -> str:
    """Return what happened to whom, with the last lines of its log; of the ``others``, which had to be ended, what those had failed with
    that the culprit gave up on: a thread of theirs may have gone on.
    """
    who = f"rank {culprit.rank} on {socket.gethostname()} (pid {culprit.process.pid})"
    if returncode == GAVE_UP_ON_A_PEER:
        happened = f"{who} gave up, because another worker died or hangs (its last lines say which)"
    else:
        happened = f"{who} {describe_exit(returncode)}"
    if (cause := culprit.spec.explain()) is not None:
        happened += f": {cause}"
    ended = {0: "", 1: "; the one other worker was ended"}.get(
        len(others), f"; the {len(others)} other workers were ended"
    )
    lines = [f"heterodyne: {happened}{ended}."]
    if culprit.log is None:
        lines.append("What it said stands above.")
    else:
        lines += _last_lines(culprit.log) or [f"Its log {culprit.log} is empty."]
    if returncode == GAVE_UP_ON_A_PEER:
        told = (_last_lines(worker.log) for worker in others if worker.log is not None)
        lines += next((found for found in told if any("Traceback (most" in line for line in found)), [])
    return "\n".join(lines)


def _last_lines(log: Path) -> list[str]:
    tail = _tail(log)
    return [f"The last lines of {log}:", *(f"    {line}" for line in tail)] if tail else []


def _tail(log: Path) -> list[str]:
    with log.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
        return file.read().decode(errors="replace").splitlines()[-_TAIL_LINES:]


def _pass_on(workers: Sequence[_Worker], stop: StopRequest, say: Callable[[str], None], *, grace_s: float) -> int:
    """Hand the signal to every worker, and wait for them to stop by themselves. Returns the exit status."""
    number = stop.number or signal.SIGTERM
    again = "press Ctrl-C again" if number == signal.SIGINT else f"send {number.name} again"
    say(f"heterodyne: {number.name}: the workers are asked to stop; {again} to end them at once.")
    running = [worker for worker in workers if worker.returncode is None]
    _signal(running, number)
    if not _wait_for(running, grace_s, lambda: stop.count > 1):
        still = ", ".join(str(worker.rank) for worker in running if worker.returncode is None)
        say(f"heterodyne: ranks that did not stop and were killed: {still}.")
    return shell_status(-number)


def _signal(workers: Sequence[_Worker], number: signal.Signals) -> None:
    for worker in workers:
        if worker.returncode is None:
            with suppress(ProcessLookupError):
                os.killpg(worker.process.pid, number)
                os.killpg(worker.process.pid, signal.SIGCONT)  # a stopped process takes no other signal


def _wait_for(
    workers: Sequence[_Worker], seconds: float, cut_short: Callable[[], bool], *, promised: bool = True
) -> bool:
    """Return whether all ended within the time, or in that which they have ``promised``."""
    until = time.monotonic() + seconds
    while running := [worker for worker in workers if worker.returncode is None]:
        latest = max([until, *(worker.line.promised_until for worker in running if promised)])
        if time.monotonic() > latest or cut_short():
            return False
        time.sleep(_POLL_S)
    return True


def _kill(workers: Sequence[_Worker], mark: str) -> None:
    """End whatever is left: the workers, and all that they started, in whatever session it is now."""
    for worker in workers:
        if worker.returncode is None:
            with suppress(ProcessLookupError):
                os.killpg(worker.process.pid, signal.SIGKILL)
            worker.process.wait()
        worker.line.close()
    kill_marked(mark)

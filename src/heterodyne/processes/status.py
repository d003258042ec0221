"""How a process ended, as a number that a shell knows and as words."""

from __future__ import annotations

import signal

from heterodyne.errors import HeterodyneError, OutOfMemoryError, WorkerError

__all__ = [
    "GAVE_UP_ON_A_PEER",
    "OUT_OF_MEMORY",
    "STOPPED",
    "TOLD",
    "describe_exit",
    "shell_status",
    "worker_exit_status",
]

GAVE_UP_ON_A_PEER = 71
"""Exit status of a worker that is well itself and ends because another one died or hangs (EX_OSERR of sysexits.h)."""

TOLD = 2
"""Exit status of a worker that ends with an error that it has explained in a message for people."""

OUT_OF_MEMORY = 79
"""Exit status of a worker whose device has run out of memory, which it has reported: another plan may go on (no number of sysexits.h)."""

STOPPED = 130
"""Exit status of a worker that has stopped in good order because somebody asked for it."""


def shell_status(returncode: int) -> int:
    """The exit status that a shell shows: a process that died of signal N counts as 128 + N."""
    return 128 - returncode if returncode < 0 else returncode


def describe_exit(returncode: int) -> str:
    """``was killed by SIGKILL`` or ``ended with exit status 3``, from a `Popen` return code."""
    if returncode == STOPPED:
        return "was interrupted (SIGINT, or another signal that asks to stop)"
    if returncode >= 0:
        return f"ended with exit status {returncode}"
    try:
        return f"was killed by {signal.Signals(-returncode).name}"
    except ValueError:
        return f"was killed by signal {-returncode}"


def worker_exit_status(error: BaseException, rank: int) -> int:
    """The exit status of the worker `rank` that ends with `error`; by it the launcher tells cause from consequence."""
    if isinstance(error, KeyboardInterrupt):
        return shell_status(-signal.SIGINT)
    if isinstance(error, WorkerError) and error.rank is not None and error.rank != rank:
        return GAVE_UP_ON_A_PEER
    if isinstance(error, OutOfMemoryError):
        return OUT_OF_MEMORY
    return TOLD if isinstance(error, HeterodyneError) else 1

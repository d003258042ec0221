"""A small process that outlives its launcher by a moment, to end the workers of a launcher that was killed.

`main` runs in a Python of its own and reads its standard input, a pipe whose other end only the launcher holds. The
launcher says ``done`` when it has ended its workers itself; an end without that word means that it is gone. It works
without privileges, and for whole trees of processes, which a parent-death signal does not.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import psutil

from heterodyne.processes.mark import marked_processes

__all__ = ["guarded", "kill_marked"]

_DONE = b"done"
_PROGRAM = "from heterodyne.processes.guardian import main; main()"
_PATIENCE_S = 5.0


@contextmanager
def guarded(mark: str) -> Iterator[None]:
    """While the block runs, the processes that bear `mark` die with this one, even if it is killed."""
    guardian = subprocess.Popen(
        # -P: what lies in the current directory must not stand in for the standard library
        [sys.executable, "-P", "-c", _PROGRAM, mark],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        start_new_session=True,  # or Ctrl-C at the terminal would end it first
    )
    try:
        yield
    finally:
        try:
            guardian.communicate(_DONE)
        except BrokenPipeError:  # somebody ended it
            guardian.wait()


def kill_marked(mark: str) -> None:
    """Kill every process that bears the mark, and those that these started meanwhile.

    It gives up after a few seconds on those that the kernel cannot end (waiting for a dead disk).
    """
    until = time.monotonic() + _PATIENCE_S
    while (processes := list(marked_processes(mark))) and time.monotonic() < until:
        for process in processes:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        time.sleep(0.02)


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # it ends with its launcher and not before
    if sys.stdin.buffer.read() != _DONE:
        kill_marked(sys.argv[1])

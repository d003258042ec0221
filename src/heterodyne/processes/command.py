"""One command beside this process, that writes into a file: it is asked to stop as this process is, and ends with it."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from heterodyne.processes.guardian import guarded, kill_marked
from heterodyne.processes.mark import marked_environment, new_mark
from heterodyne.processes.signals import stop_requests
from heterodyne.processes.status import shell_status

__all__ = ["run_logged"]

_POLL_S = 0.1


def run_logged(command: Sequence[str], log: Path) -> tuple[int, bool]:
    """Run a command until it has ended; return its exit status, and whether this process was asked to stop meanwhile.

    Ctrl-C and SIGTERM are passed on, each time that they come, and the command ends in its own order. If this process is killed, the
    command and all that it has started die with it. Raises OSError if the log cannot be written.
    """
    mark, passed = new_mark(), 0
    with stop_requests() as stop, guarded(mark), log.open("wb") as output:
        process = subprocess.Popen(
            command,
            env=marked_environment(mark, os.environ),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,  # so that a terminal's Ctrl-C comes once
        )
        try:
            while process.poll() is None:
                if stop.count > passed:
                    passed = stop.count
                    with suppress(ProcessLookupError):
                        process.send_signal(stop.number or signal.SIGTERM)
                with suppress(subprocess.TimeoutExpired):
                    process.wait(_POLL_S)
        finally:
            kill_marked(mark)
            process.wait()
        return shell_status(process.returncode), stop.number is not None

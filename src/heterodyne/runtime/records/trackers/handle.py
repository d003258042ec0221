"""One tracker as the training sees it: its process, what that has reported, and its one warning."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, BinaryIO

__all__ = ["TrackerHandle"]

_START = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from heterodyne.runtime.records.trackers.process import main; main()"
_EVERY_S = 0.1  # the process is looked at so seldom where steps are short
_PATIENCE_S = 60.0  # how long no record may be taken before people are told
_KILLED_S = 10.0  # a process that waits for a disk which does not answer cannot be ended at all


class TrackerHandle:
    """Starts the process of one tracker, and never waits for it until it is closed.

    What goes wrong is said once, as a warning. A tracker that lacks records at the end is named with their number.

    Args:
        name: of the tracker.
        records: the file that the process reads, which begins with what it is opened with; see ``process.py``.
        log: where what its library prints goes.
        flush_s: seconds that its process may go on after the end of the training.
        say: takes each line for people.
    """

    def __init__(self, name: str, records: IO[bytes], *, log: Path, flush_s: float, say: Callable[[str], None]) -> None:
        self._name = name
        self._log = log
        self._flush_s = flush_s
        self._say = say
        self._given = self._taken = 0
        self._went_on_s = self._looked_s = time.monotonic()
        self._warned = False
        self.is_over = False  # it takes no more records
        self._reported = b""
        self._process: subprocess.Popen[bytes] | None = None
        try:
            self._process = _start(name, records, log)
        except OSError as error:
            self._over(f"cannot be started ({error.strerror})")

    def given(self) -> None:
        """There is one more record in the file. Returns at once, whatever the tracker does."""
        now_s = time.monotonic()
        if self._taken == self._given:
            self._went_on_s = now_s  # until now there was nothing to take
        self._given += 1
        if now_s - self._looked_s < _EVERY_S:
            return
        self._looked_s = now_s
        self._read_reports()
        if not self.is_over and now_s - self._went_on_s > _PATIENCE_S:
            self._warn(f"has taken nothing for {_PATIENCE_S:.0f} s; training goes on")

    def close(self, seconds: float) -> None:
        """Wait so long for the tracker to write everything, after the end of the records, then end it."""
        if self._process is None:
            return
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)
        self._read_reports()
        if not self.is_over:
            lost = f"it lacks {self._given - self._taken} of {self._given} records"
            text = f"tracker {self._name} had not finished {self._flush_s:g} s after the end of the run, and was ended; {lost}"
            self._say(text if self._warned else f"warning: {text}")
        _put_an_end_to(self._process)
        self._process = None

    def _read_reports(self) -> None:
        if self.is_over or self._process is None:
            return
        code = self._process.poll()  # before the reports are read, so that none comes later
        assert self._process.stdout is not None
        while chunk := self._process.stdout.read(1 << 16):
            self._reported += chunk
        *lines, self._reported = self._reported.split(b"\n")
        for line in lines:
            told: dict[str, Any] = json.loads(line)
            self._went_on_s = time.monotonic()
            self._taken += told.get("taken", 0)
            if told.get("opened"):
                self._say(f"{self._name}: {told['opened']}")
            if "failed" in told:
                remedy = "; ".join(filter(None, (told["remedy"], f"see {self._log}")))
                self._over(f"failed ({told['failed']}): {remedy}")
            if "closed" in told:
                self.is_over = True
        if code is not None and not self.is_over:
            self._over(f"ended {f'by signal {-code}' if code < 0 else f'with status {code}'}; see {self._log}")

    def _over(self, why: str) -> None:
        self.is_over = True
        self._warn(f"{why}. It is off for the rest of the run, and training goes on")

    def _warn(self, what: str) -> None:
        """At most once: what follows from the first is no news."""
        if not self._warned:
            self._warned = True
            self._say(f"warning: tracker {self._name} {what}")


def _start(name: str, records: IO[bytes], log: Path) -> subprocess.Popen[bytes]:
    """A process in a session of its own, so that Ctrl-C reaches the training alone. Raises OSError."""
    try:
        printed: BinaryIO | None = log.open("ab")
    except OSError:  # a full disk costs what the library prints
        printed = None
    try:
        process = subprocess.Popen(
            [sys.executable, "-c", _START, json.dumps(sys.path), name, str(os.getpid())],
            stdin=records,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL if printed is None else printed,
            bufsize=0,
            start_new_session=True,
        )
    finally:
        if printed is not None:
            printed.close()
    assert process.stdout is not None
    os.set_blocking(process.stdout.fileno(), False)
    return process


def _put_an_end_to(process: subprocess.Popen[bytes]) -> None:
    """With everything that it started."""
    if process.returncode is None:  # else its number may be another's by now
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
    if process.stdout is not None:
        process.stdout.close()
    with suppress(subprocess.TimeoutExpired):
        process.wait(_KILLED_S)

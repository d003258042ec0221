"""One tracker as the training sees it: a pipe to its process that is never waited for, and its one warning."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, BinaryIO

from heterodyne.runtime.records.trackers.process import END
from heterodyne.runtime.records.trackers.tracker import Opening, Record

__all__ = ["TrackerQueue"]

_START = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from heterodyne.runtime.records.trackers.process import main; main()"
_EVERY_S = 0.1  # records are handed on so seldom where steps are short
_AT_ONCE = 100
_KILLED_S = 1.0  # a process that waits for a disk which does not answer cannot be ended at all


class TrackerQueue:
    """Gives records to the process of one tracker, in order, and never waits for it until it is closed.

    There is no thread: a `write`, a few times a second, hands on what the pipe takes at that moment and reads what the process has
    reported. What goes wrong is said once, as a warning. A tracker that lacks records at the end is named with their number.

    Args:
        kind: the file of this room that opens the tracker.
        log: where what its library prints goes.
        flush_s: seconds that its process may go on after the end of the training.
        say: takes each line for people.
        capacity: records that may wait; later ones are dropped until there is room.
        patience_s: how long no record may be taken before people are told.
        clock: seconds that never go back.
    """

    def __init__(
        self,
        kind: str,
        opening: Opening,
        *,
        log: Path,
        flush_s: float,
        say: Callable[[str], None],
        capacity: int = 10_000,
        patience_s: float = 60.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._kind = kind
        self._log = log
        self._flush_s = flush_s
        self._say = say
        self._capacity = capacity
        self._patience_s = patience_s
        self._clock = clock
        self._waiting: deque[Record] = deque()
        self._given = self._taken = self._dropped = 0
        self._went_on_s = self._exchanged_s = clock()
        self._warned = self._is_over = self._ending = self._end_is_said = False
        self._reported = b""
        self._process: subprocess.Popen[bytes] | None = None
        header = {"kind": kind, "flush_s": flush_s, "opening": {**asdict(opening), "directory": str(opening.directory)}}
        self._unsent = json.dumps(header).encode() + b"\n"
        try:
            self._process = _start(log)
        except OSError as error:
            self._warn(f"cannot be started ({error.strerror})")
            self._is_over = True
        else:
            self._exchange()

    def write(self, record: Record) -> None:
        """Returns at once, whatever the tracker does."""
        self._given += 1
        if self._is_over:
            return
        if self._taken + self._dropped == self._given - 1:
            self._went_on_s = self._clock()  # until now there was nothing to take
        if len(self._waiting) < self._capacity:
            self._waiting.append(record)
        else:
            self._dropped += 1
        if self._clock() - self._exchanged_s >= _EVERY_S:
            self._exchange()
        if self._is_over or self._warned:
            return
        if self._dropped:
            self._warn(
                f"does not keep up: {len(self._waiting)} records wait, and later ones are dropped until there is room"
            )
        elif self._clock() - self._went_on_s > self._patience_s:
            self._warn(f"has taken nothing for {self._patience_s:.0f} s; training goes on")

    def end(self) -> None:
        """No more records come. Returns at once."""
        if not self._is_over and not self._ending:
            self._ending = True
            self._exchange()

    def close(self, seconds: float) -> None:
        """Wait so long for the tracker to write everything, then end it."""
        self.end()
        until_s = self._clock() + seconds
        if not self._is_over:  # what it has reported since, also where there is no time left
            self._exchange()
        while not self._is_over and (left_s := until_s - self._clock()) > 0:
            self._wait(left_s)
            self._exchange()
        if self._process is None:
            return
        if not self._is_over:
            self._tell_the_end(f"had not finished {self._flush_s:g} s after the end of the run, and was ended")
        elif self._dropped:
            self._tell_the_end("did not keep up")
        _put_an_end_to(self._process)
        self._process = None

    @property
    def _stdin(self) -> BinaryIO:
        assert self._process is not None
        assert self._process.stdin is not None
        return self._process.stdin  # type: ignore[return-value]  # unbuffered, as asked

    @property
    def _stdout(self) -> BinaryIO:
        assert self._process is not None
        assert self._process.stdout is not None
        return self._process.stdout  # type: ignore[return-value]

    def _exchange(self) -> None:
        """Hand on what the pipe takes, and read what was reported."""
        self._exchanged_s = self._clock()
        try:
            while self._unsent or self._serialise():
                self._unsent = self._unsent[os.write(self._stdin.fileno(), self._unsent) :]
            if self._ending:
                self._stdin.close()  # which wakes the process
        except (BlockingIOError, BrokenPipeError):
            pass  # the pipe is full; or the process has ended, and what it has reported says why
        try:
            while chunk := os.read(self._stdout.fileno(), 1 << 16):
                self._reported += chunk
        except BlockingIOError:
            self._read_reports()
        else:
            self._read_reports()
            if not self._is_over:
                self._over(f"ended{_how(self._process)}; see {self._log}")

    def _serialise(self) -> bool:
        """Make lines of the next records; whether there are any."""
        records = [self._waiting.popleft() for _ in range(min(_AT_ONCE, len(self._waiting)))]
        lines = [json.dumps([each.step, each.time_s, dict(each.values)]).encode() for each in records]
        if self._ending and not self._waiting and not self._end_is_said:
            self._end_is_said = True
            lines.append(END)
        self._unsent = b"".join(line + b"\n" for line in lines)
        return bool(lines)

    def _read_reports(self) -> None:
        *lines, self._reported = self._reported.split(b"\n")
        for line in lines:
            told: dict[str, Any] = json.loads(line)
            self._went_on_s = self._clock()
            self._taken += told.get("taken", 0)
            if told.get("opened"):
                self._say(f"{self._kind}: {told['opened']}")
            if "failed" in told:
                self._over(
                    f"failed ({told['failed']}): {'; '.join(filter(None, (told['remedy'], f'see {self._log}')))}"
                )
            if "closed" in told:
                self._is_over = True

    def _over(self, why: str) -> None:
        self._is_over = True
        self._waiting.clear()
        self._warn(f"{why}. It is off for the rest of the run, and training goes on")

    def _warn(self, what: str) -> None:
        """At most once: what follows from the first is no news."""
        if not self._warned:
            self._warned = True
            self._say(f"warning: tracker {self._kind} {what}")

    def _tell_the_end(self, what: str) -> None:
        lost = self._given - self._taken
        text = f"tracker {self._kind} {what}; it lacks {lost} of {self._given} records"
        self._say(text if self._warned else f"warning: {text}")
        self._warned = True

    def _wait(self, seconds: float) -> None:
        """Until the process takes or reports something."""
        ready = select.poll()
        ready.register(self._stdout.fileno(), select.POLLIN)
        if self._unsent:
            ready.register(self._stdin.fileno(), select.POLLOUT)
        ready.poll(max(1, round(1000 * seconds)))


def _start(log: Path) -> subprocess.Popen[bytes]:
    """A process in a session of its own, so that Ctrl-C reaches the training alone. Raises OSError."""
    try:
        printed: BinaryIO | None = log.open("ab")
    except OSError:  # a full disk costs what the library prints
        printed = None
    try:
        process = subprocess.Popen(
            [sys.executable, "-c", _START, json.dumps(sys.path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL if printed is None else printed,
            bufsize=0,
            start_new_session=True,
        )
    finally:
        if printed is not None:
            printed.close()
    assert process.stdin is not None
    assert process.stdout is not None
    os.set_blocking(process.stdin.fileno(), False)
    os.set_blocking(process.stdout.fileno(), False)
    return process


def _how(process: subprocess.Popen[bytes] | None) -> str:
    code = None if process is None else process.poll()
    return "" if not code else f" by signal {-code}" if code < 0 else f" with status {code}"


def _put_an_end_to(process: subprocess.Popen[bytes]) -> None:
    """With everything that it started."""
    if process.returncode is None:  # else its number may be another's by now
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()
    with suppress(subprocess.TimeoutExpired):
        process.wait(_KILLED_S)

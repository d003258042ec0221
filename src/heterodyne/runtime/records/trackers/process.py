"""The process of one tracker. It reads lines from its standard input and writes lines about itself to its standard output.

    in    what it is opened with; a line a record; ``end``
    out   {"opened": PLACE}, {"taken": RECORDS}, {"failed": WHAT, "remedy": TEXT}, {"closed": true}

What the tracker's library prints goes to standard error, which is a log file. The process outlives a parent that is gone, to write
what it was given, but not for longer than it would have been given at the end of the run.
"""

from __future__ import annotations

import errno
import importlib
import json
import os
import select
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Mapping
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import Any, TextIO

from heterodyne.runtime.records.trackers.tracker import Opening, Record

__all__ = ["END", "main"]

END = b"end"

_NICE = 5  # where training computes on the same CPU, it goes first
_TOGETHER_S = 0.25  # records are taken so seldom, since each time takes the processor from the training
_LATER_S = 5.0  # a parent that is still there ends this process before that, and says so
_LONGEST = 300  # characters of a failure; the log has all


def main() -> None:
    """Never returns: exit hooks of the libraries could wait for a network."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends the training, which then closes its trackers
    with suppress(OSError):
        os.nice(_NICE)
    reports = os.fdopen(os.dup(1), "w", encoding="utf-8", buffering=1)
    os.dup2(2, 1)
    try:
        _run(reports)
    finally:
        os._exit(0)


def _run(reports: TextIO) -> None:
    def report(**what: Any) -> None:
        with suppress(BrokenPipeError):  # the training is gone: there is nobody to tell
            reports.write(json.dumps(what) + "\n")

    arrivals = _arrivals()
    first, *early = next(arrivals)
    header: Mapping[str, Any] = json.loads(first)
    threading.Thread(target=_end_after_the_parent, args=(header["flush_s"],), daemon=True).start()
    remedy = ""
    try:
        module = importlib.import_module(f"heterodyne.runtime.records.trackers.{header['kind']}")
        remedy = module.REMEDY
        tracker = module.open_tracker(
            Opening(**{**header["opening"], "directory": Path(header["opening"]["directory"])})
        )
        report(opened=getattr(tracker, "place", ""))
        for lines in chain([early], arrivals):
            records = [_record(line) for line in lines if line != END]
            if records:
                tracker.write(records)
                report(taken=len(records))
            if END in lines:
                break
        tracker.close()
        with suppress(OSError, ValueError):  # whoever reads this next ends the process, with what it has not written
            sys.stdout.flush()
        report(closed=True)
    except BaseException as error:  # noqa: BLE001  # libraries also raise SystemExit
        with suppress(OSError):  # the disk of the log may be full
            traceback.print_exc()
        report(failed=_told(error), remedy=_remedy(error, remedy))


def _arrivals() -> Iterator[list[bytes]]:
    """The whole lines that have come since the last turn, at least one, until standard input ends."""
    rest = b""
    while chunk := os.read(0, 1 << 16):
        *lines, rest = (rest + chunk).split(b"\n")
        if lines:
            yield lines
        _wait_for_the_end(_TOGETHER_S)


def _record(line: bytes) -> Record:
    step, time_s, values = json.loads(line)
    return Record(step=step, time_s=time_s, values=values)


def _wait_for_the_end(seconds: float | None) -> None:
    """Until nobody holds the other end of standard input, but not longer than that."""
    hang_up = select.poll()
    hang_up.register(0, 0)
    hang_up.poll(None if seconds is None else 1000 * seconds)


def _end_after_the_parent(flush_s: float) -> None:
    """Whatever the tracker hangs in."""
    _wait_for_the_end(None)
    time.sleep(flush_s + _LATER_S)
    os._exit(1)


def _told(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}"[:_LONGEST] if text else type(error).__name__


def _remedy(error: BaseException, of_the_tracker: str) -> str:
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, OSError) and seen.errno in {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}:
            return "make room on that disk"
        seen = seen.__cause__ or seen.__context__
    return of_the_tracker

"""The process of one tracker. It follows a file that grows, its standard input, and writes lines about itself to its standard output.

    in    what each tracker is opened with, by name; a line a record; ``end``
    out   {"opened": PLACE}, {"taken": RECORDS}, {"failed": WHAT, "remedy": TEXT}, {"closed": true}

What the tracker's library prints goes to standard error, which is a log file. The process outlives a parent that is gone, to write
what it was given, but not for longer than it would have been given at the end of the run.
"""

from __future__ import annotations

import errno
import importlib
import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

from heterodyne.runtime.records.trackers.tracker import Opening, Record

__all__ = ["END", "main"]

END = "end"

_NICE = 5  # where training computes on the same CPU, it goes first
_TOGETHER_S = 0.25  # the file is looked at so seldom, since each time takes the processor from the training
_TOGETHER = 1000  # records at a time, after each of which the training hears that the tracker goes on
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

    kind, parent = sys.argv[2], int(sys.argv[3])
    lines = _lines(parent)
    header: Mapping[str, Any] = json.loads(next(lines)[0])
    threading.Thread(target=_end_after_the_parent, args=(parent, header["flush_s"]), daemon=True).start()
    remedy = ""
    try:
        module = importlib.import_module(f"heterodyne.runtime.records.trackers.{kind}")
        remedy = module.REMEDY
        opening = {
            **header["opening"],
            "options": header["options"][kind],
            "directory": Path(header["opening"]["directory"]),
        }
        tracker = module.open_tracker(Opening(**opening))
        report(opened=getattr(tracker, "place", ""))
        for together in lines:
            tracker.write([_record(line) for line in together])
            report(taken=len(together))
        tracker.close()
        with suppress(OSError, ValueError):  # whoever reads this next ends the process, with what it has not written
            sys.stdout.flush()
        report(closed=True)
    except BaseException as error:  # noqa: BLE001  # libraries also raise SystemExit
        with suppress(OSError):  # the disk of the log may be full
            traceback.print_exc()
        report(failed=_told(error), remedy=_remedy(error, remedy))


def _lines(parent: int) -> Iterator[list[bytes]]:
    """The first line, then the lines that have come since the last turn, at least one; until ``end``, or the parent is gone."""
    at, most = 0, 1
    while True:
        is_last = os.getppid() != parent  # before the file is read, so that nothing comes later
        new = os.pread(0, os.fstat(0).st_size - at, at)  # whose position is shared with the parent
        new = new[: new.rfind(b"\n") + 1]  # a line that is not whole is read again
        at += len(new)
        lines = new.splitlines()
        ends = bool(lines) and lines[-1] == END.encode()
        if ends:
            del lines[-1]
        while lines:
            yield lines[:most]
            lines, most = lines[most:], _TOGETHER
        if ends or is_last:
            return
        time.sleep(_TOGETHER_S)


def _record(line: bytes) -> Record:
    step, time_s, values = json.loads(line)
    return Record(step=step, time_s=time_s, values=values)


def _end_after_the_parent(parent: int, flush_s: float) -> None:
    """Whatever the tracker hangs in."""
    while os.getppid() == parent:
        time.sleep(1.0)
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

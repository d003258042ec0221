"""The line between a launcher and each of its workers: a socket of which nothing is read but its end, and what a worker promises.

A worker whose launcher is gone ends, also where nobody is left to end it. A worker that was asked to stop, and finishes something first,
tells its launcher how long to wait.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import threading
import time
from contextlib import suppress

__all__ = ["VARIABLE", "LauncherEnd", "end_with_launcher", "promise"]

VARIABLE = "HETERODYNE_LAUNCHER"
_GONE = 71  # as a worker that gives up on a peer


class LauncherEnd:
    """The launcher's end of the line to one worker. `worker` is the other one, to be closed here once the worker has it."""

    def __init__(self) -> None:
        self._own, self.worker = socket.socketpair()
        self._own.setblocking(False)
        self._until = 0.0

    @property
    def variable(self) -> str:
        """By which the worker finds its end. The number of the socket tells it from what a child of the worker has at that place."""
        return f"{self.worker.fileno()}:{os.fstat(self.worker.fileno()).st_ino}"

    @property
    def promised_until(self) -> float:
        """Until when, on the monotonic clock, the worker was heard to need."""
        with suppress(OSError):
            while said := self._own.recv(4096):
                self._until = time.monotonic() + said[-1]
        return self._until

    def close(self) -> None:
        self._own.close()
        self.worker.close()


def promise(seconds: float) -> None:
    """Tell the launcher, if there is one of ours, to wait so long for this process to stop."""
    descriptor = _descriptor()
    if descriptor is not None:
        with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as line:
            line.send(bytes([min(255, int(seconds))]), socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)


def end_with_launcher() -> None:
    """From now on this process, and those in its group, end when its launcher is gone."""
    global _watched
    descriptor = _descriptor()
    if descriptor is not None and _watched != os.getpid():
        _watched = os.getpid()
        threading.Thread(target=_watch, args=(descriptor,), name="heterodyne-launcher", daemon=True).start()


_watched: int | None = None


def _watch(descriptor: int) -> None:
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    poll.poll()
    with suppress(OSError):
        os.write(2, b"heterodyne: the launcher is gone, so this worker ends\n")
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(_GONE)


def _descriptor() -> int | None:
    number, _, inode = os.environ.get(VARIABLE, "").partition(":")
    try:
        return int(number) if os.fstat(int(number)).st_ino == int(inode) else None
    except (OSError, ValueError):
        return None

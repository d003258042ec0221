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

__all__ = ["VARIABLE", "LauncherEnd", "blame_another", "end_with_launcher", "promise"]

VARIABLE = "HETERODYNE_LAUNCHER"
_GONE = 71  # as a worker that gives up on a peer
_BLAMES = 255  # other numbers are seconds


class LauncherEnd:
    """The launcher's end of the line to one worker. `worker` is the other one, to be closed here once the worker has it."""

    def __init__(self) -> None:
        self._own, self.worker = socket.socketpair()
        self._own.setblocking(False)
        self._until = 0.0
        self._blames = False

    @property
    def variable(self) -> str:
        """By which the worker finds its end. The number of the socket tells it from what a child of the worker has at that place."""
        return f"{self.worker.fileno()}:{os.fstat(self.worker.fileno()).st_ino}"

    @property
    def promised_until(self) -> float:
        """Until when, on the monotonic clock, the worker was heard to need."""
        self._read()
        return self._until

    @property
    def blames_another(self) -> bool:
        """Return whether the worker has said that another one is why it ends."""
        self._read()
        return self._blames

    def _read(self) -> None:
        with suppress(OSError):
            while said := self._own.recv(4096):
                self._blames |= _BLAMES in said
                seconds = said.replace(bytes([_BLAMES]), b"")
                self._until = time.monotonic() + seconds[-1] if seconds else self._until

    def close(self) -> None:
        self._own.close()
        self.worker.close()


def promise(seconds: float) -> None:
    """Tell the launcher, if there is one of ours, to wait so long for this process to stop."""
    _say(min(_BLAMES - 1, int(seconds)))


def blame_another() -> None:
    """Tell the launcher, if there is one of ours, that this process ends because of another one, whatever its exit status will be."""
    _say(_BLAMES)


def _say(number: int) -> None:
    descriptor = _descriptor()
    if descriptor is not None:
        with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as line:
            line.send(bytes([number]), socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)


def end_with_launcher() -> None:
    """From now on this process, and those in its group, end when its launcher is gone."""
    descriptor = _descriptor()
    if descriptor is not None and os.getpid() not in _watched:
        _watched.add(os.getpid())
        threading.Thread(target=_watch, args=(descriptor,), name="heterodyne-launcher", daemon=True).start()


_watched: set[int] = set()  # this process, once it is


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

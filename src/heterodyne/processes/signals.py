"""The wish of somebody outside that all this stops: Ctrl-C, SIGTERM, a terminal that is closed."""

from __future__ import annotations

import os
import selectors
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from types import FrameType

from heterodyne.processes.parent import promise
from heterodyne.processes.status import shell_status

__all__ = ["StopRequest", "finished_first", "orderly_stop", "stop_requests"]

_WATCHED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_AGAIN_S = 1.0  # a launcher and a terminal may both pass the same wish on
_PROMISE_EVERY_S = 1.0
_PROMISED_S = 60.0
_SAY_EVERY_S = 5.0


@dataclass(kw_only=True)
class StopRequest:
    """The first signal that came (None: none yet) and how many came."""

    number: signal.Signals | None = None
    count: int = 0
    _under_way: tuple[str, float, float] = ("", 0.0, 0.0)
    _agreed: threading.Event = field(default_factory=threading.Event)

    def begin(self, words: str, most_s: float) -> None:
        """Note what is under way from now on, and how long it may take once a signal has come."""
        self._under_way = (words, time.monotonic(), most_s)

    def agree(self) -> None:
        """This process stops as well, because another one of the run was asked to."""
        self._agreed.set()


_open: list[StopRequest] = []  # at most one
_before: dict[int, Callable[[int, FrameType | None], object] | int | None] = {}


def _forget() -> None:
    """A child that was forked obeys signals as before, and is not heard as if it were its parent."""
    if _before:
        signal.set_wakeup_fd(-1)
        for number, handler in _before.items():
            signal.signal(number, handler)


os.register_at_fork(after_in_child=_forget)


@contextmanager
def stop_requests() -> Iterator[StopRequest]:
    """While the block runs, signals that ask to stop are noted instead of obeyed. A block inside of another one shares its request.

    Python lets only the main thread do this; in another one nothing is noted, and the process obeys as before.
    """
    if _open:
        yield _open[0]
        return
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield request
        return

    def note(number: int, _frame: FrameType | None) -> None:
        request.number = request.number or signal.Signals(number)
        request.count += 1

    _before.update({number: signal.signal(number, note) for number in _WATCHED})
    _open.append(request)
    try:
        yield request
    finally:
        _open.clear()
        for number, handler in _before.items():
            signal.signal(number, handler)
        _before.clear()


def is_stop_requested() -> bool:
    """Return whether a signal has asked this process to stop, in a block in which that is noted."""
    return any(request.number is not None for request in _open)


@contextmanager
def orderly_stop(words: str, most_s: float, say: Callable[[str], None]) -> Iterator[StopRequest]:
    """As `stop_requests`, for work that is ended in good order: after a signal it is said every few seconds what is finished first, a
    launcher that asked is asked to wait, and a second signal ends the process at once.

    A thread does so, since the main thread may be in a step for long.

    Args:
        words, most_s: what is under way first (`StopRequest.begin`).
        say: takes each line for people, from that thread.
    """
    if _open or threading.current_thread() is not threading.main_thread():
        with stop_requests() as request:
            request.begin(words, most_s)
            yield request
        return
    heard, told = socket.socketpair()
    with heard, told, stop_requests() as request:
        request.begin(words, most_s)
        told.setblocking(False)
        before = signal.set_wakeup_fd(told.fileno(), warn_on_full_buffer=False)
        listener = threading.Thread(target=_listen, args=(heard, request, say), name="heterodyne-stop", daemon=True)
        listener.start()
        try:
            yield request
        finally:
            signal.set_wakeup_fd(before)
            told.close()
            listener.join()


def _listen(heard: socket.socket, request: StopRequest, say: Callable[[str], None]) -> None:
    """Until the other end of the socket closes. What comes are the numbers of signals, as soon as they reach the process."""
    first: tuple[signal.Signals, float] | None = None
    said = time.monotonic()
    with selectors.DefaultSelector() as selector:
        selector.register(heard, selectors.EVENT_READ)
        while True:
            if selector.select(_PROMISE_EVERY_S):
                numbers = heard.recv(64)
                if not numbers:
                    return
                for number in map(signal.Signals, filter(_WATCHED.__contains__, numbers)):
                    now = time.monotonic()
                    if first is None:
                        first, said = (number, now), now
                    elif now - first[1] > _AGAIN_S:
                        _end_at_once(number)
            now = time.monotonic()
            words, since, most_s = request._under_way
            if first is None and not request._agreed.is_set():
                continue
            if now - since < most_s:
                promise(_PROMISED_S)
            if first is not None and now - said >= _SAY_EVERY_S:
                said = now
                say(
                    f"heterodyne: {first[0].name}: {words} is finished first (for {now - since:.0f} s now); a second one ends it at once"
                )


def _end_at_once(number: signal.Signals) -> None:
    with suppress(OSError):
        os.write(2, f"heterodyne: {number.name} again: ended at once, what was under way is lost\n".encode())
    os._exit(shell_status(-number))


@contextmanager
def finished_first(words: str, most_s: float, say: Callable[[str], None]) -> Iterator[None]:
    """A signal that asks to stop is obeyed at the end of the block, which is ``words`` for people and may take ``most_s`` seconds."""
    nested = bool(_open)
    with orderly_stop(words, most_s, say) as request:
        try:
            yield
        finally:
            asked = request.number
    if asked is not None and not nested:
        signal.raise_signal(asked)

"""The wish of somebody outside that all this stops: Ctrl-C, SIGTERM, a terminal that is closed."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

__all__ = ["StopRequest", "stop_requests"]

_WATCHED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(kw_only=True)
class StopRequest:
    """The first signal that came (None: none yet) and how many came."""

    number: signal.Signals | None = None
    count: int = 0


@contextmanager
def stop_requests() -> Iterator[StopRequest]:
    """While the block runs, signals that ask to stop are noted instead of obeyed.

    Python lets only the main thread do this; in another one nothing is noted, and the process obeys as before.
    """
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield request
        return

    def note(number: int, _frame: FrameType | None) -> None:
        request.number = request.number or signal.Signals(number)
        request.count += 1

    before = {number: signal.signal(number, note) for number in _WATCHED}
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)

"""A search that says what it has found so far, and can be asked to stop with that."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import monotonic

from heterodyne.processes.signals import stop_requests
from heterodyne.processes.status import shell_status
from heterodyne.search.fleet.evaluator import Watch
from heterodyne.search.fleet.plan import Candidate
from heterodyne.units import format_seconds

__all__ = ["watched"]


@contextmanager
def watched(seconds: float | None, say: Callable[[str], None]) -> Iterator[Watch]:
    """Ctrl-C is a question for the best plan so far; the second one ends the program, as any other signal does."""
    said = False

    def asked() -> bool:
        nonlocal said
        if request.count > 1 or request.number not in (None, signal.SIGINT):
            raise SystemExit(shell_status(-(request.number or signal.SIGINT)))
        if request.count and not said:
            said = True
            say("stopping with the best plan so far; press Ctrl-C again to quit")
        return request.count > 0

    def told(candidate: Candidate) -> None:
        own = candidate.predicted
        say(f"so far: a step of {format_seconds(own.step_s)} on {own.devices:,} devices")

    with stop_requests() as request:
        yield Watch(deadline_s=None if seconds is None else monotonic() + seconds, asked=asked, told=told)

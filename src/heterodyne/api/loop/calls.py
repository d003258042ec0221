"""Which collective call of the user's loop a rank is in, for the watchdog: ranks that call different things would wait for ever."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from heterodyne.api.session import Session

__all__ = ["Calls"]


class Calls:
    """Names the calls of a loop, the outermost where one makes another."""

    def __init__(self, session: Session) -> None:
        self._watchdog = session.watchdog
        self._inside = False

    @contextmanager
    def named(self, words: str) -> Iterator[None]:
        """While the block runs this rank is in that collective call."""
        if self._watchdog is None or self._inside:
            yield
            return
        self._inside = True
        try:
            with self._watchdog.calling(words):
                yield
        finally:
            self._inside = False

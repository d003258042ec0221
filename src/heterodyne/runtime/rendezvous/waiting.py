"""Waiting that is never mute: every few seconds it is said for what, and since when."""

from __future__ import annotations

import time
from collections.abc import Callable

__all__ = ["WAITING_EVERY_S", "Waiting"]

WAITING_EVERY_S = 10.0


class Waiting:
    """One wait, from now on.

    Args:
        most_s: how long it may take.
        every_s: how often it is said.
        say: takes the lines; None: another rank says the same.
    """

    def __init__(self, most_s: float, *, every_s: float = WAITING_EVERY_S, say: Callable[[str], None] | None) -> None:
        self.most_s = most_s
        self._every_s = every_s
        self._say = say
        self._start = self._said = time.monotonic()

    def is_over(self, words: str) -> bool:
        """Return whether the time is over; until then the words are said now and then."""
        now = time.monotonic()
        if self._say is not None and now - self._said >= self._every_s:
            self._said = now
            self._say(f"heterodyne: {words} (for {now - self._start:.0f} s; at most {self.most_s:.0f} s)")
        return now - self._start > self.most_s

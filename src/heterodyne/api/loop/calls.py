"""Which collective call of the user's loop a rank is in.

The watchdog is informed, since ranks that call different things would wait forever; and weights that not every rank holds whole may be
touched by the runtime alone.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager

from heterodyne.api.session import Session
from heterodyne.errors import HeterodyneError
from heterodyne.runtime.weights.unheld import UnheldWeights

__all__ = ["Calls"]


class Calls:
    """Names the calls of a loop, the outermost where one makes another. ``unheld``: those weights of this rank."""

    def __init__(self, session: Session, unheld: UnheldWeights) -> None:
        self._session = session
        self._unheld = unheld
        self._inside = False
        self._block: tuple[str, Collection[str]] | None = None

    @contextmanager
    def block(self, words: str, allowed: Collection[str] = ()) -> Iterator[None]:
        """While the block runs, which is ``words`` for people, only calls that are ``allowed`` may be made."""
        self._block = (words, allowed)
        try:
            yield
        finally:
            self._block = None

    @contextmanager
    def named(self, words: str) -> Iterator[None]:
        """While the block runs this rank is in that collective call. Raises HeterodyneError if it may not be made now."""
        if self._inside:
            yield
            return
        if self._block is not None and words not in self._block[1]:
            raise HeterodyneError(f"{words} is called inside of {self._block[0]}: call it after that block")
        self._inside = True
        try:
            with ExitStack() as stack:
                stack.enter_context(self._unheld.lifted())
                stack.enter_context(self._session.calling(words))
                yield
        finally:
            self._inside = False

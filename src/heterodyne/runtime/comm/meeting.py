"""A barrier between processes of one machine: a byte in a pipe signals arrival, so waiting does not spin.

It is no collective of a backend, so a thread may use it while the rest of its process communicates.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path

from heterodyne.errors import WorkerError

__all__ = ["Meeting"]

Gather = Callable[[object], list[object]]


class Meeting:
    """Made by `allocate`, collectively. ``tell`` and ``hear``: the ends of a pipe to and from each other rank."""

    def __init__(self, tell: Mapping[int, int], hear: Mapping[int, int]) -> None:
        self._tell, self._hear = dict(tell), dict(hear)

    @classmethod
    def allocate(cls, places: int, place: int, gather: Gather) -> Meeting | None:
        """Between that many ranks, of which this is the ``place``-th; None, on every rank alike, if one of them cannot."""
        pipes = {peer: os.pipe() for peer in range(places) if peer != place}
        tell: dict[int, int] = {}
        try:
            paths = {peer: f"/proc/{os.getpid()}/fd/{write}" for peer, (_, write) in pipes.items()}
            for peer, told in enumerate(gather(paths)):
                if peer != place and isinstance(told, dict):
                    try:
                        tell[peer] = os.open(Path(told[place]), os.O_WRONLY)
                    except OSError:  # of another user, or hidden from this one
                        continue
            everywhere = all(gather(len(tell) == places - 1))
        finally:
            # Only the others hold the ends that they write into, so that it is heard when they are gone.
            for _, write in pipes.values():
                os.close(write)
        made = cls(tell, {peer: read for peer, (read, _) in pipes.items()})
        if everywhere:
            return made
        made.close()
        return None

    def meet(self) -> None:
        """Wait until all have arrived. Raises WorkerError if one of them is gone."""
        for end in self._tell.values():
            try:
                os.write(end, b"m")
            except BrokenPipeError as error:
                raise WorkerError(f"a collective broke off, so another worker has probably died: {error}") from error
        for end in self._hear.values():
            if not os.read(end, 1):
                raise WorkerError("a collective broke off, so another worker has probably died: its pipe is closed")

    def close(self) -> None:
        for end in (*self._tell.values(), *self._hear.values()):
            os.close(end)
        self._tell.clear()
        self._hear.clear()

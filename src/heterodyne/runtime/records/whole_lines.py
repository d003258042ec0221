"""A file that grows line by line and holds whole lines only."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress

__all__ = ["WholeLines"]


class WholeLines:
    """Appends lines to a file, each whole or not at all. A disk that is full costs lines and one warning, and raises nothing.

    Args:
        descriptor: of the file, open for writing.
        length: bytes of it that stay; what follows them is cut off. Raises OSError if that cannot be done.
        complain: takes the reason why the first line that is lost was lost.
    """

    def __init__(self, descriptor: int, *, length: int = 0, complain: Callable[[str], None]) -> None:
        os.ftruncate(descriptor, length)
        self._descriptor = descriptor
        self._length = length
        self._complain: Callable[[str], None] | None = complain

    def write(self, text: str) -> bool:
        """Append a line, whose end is added here; return whether it is there."""
        line = text.encode() + b"\n"
        try:
            written = os.pwrite(self._descriptor, line, self._length)
            if written < len(line):  # the disk is full in the middle of the line: the rest says why it fails
                os.pwrite(self._descriptor, line[written:], self._length + written)
        except OSError as error:
            with suppress(OSError):  # later lines, if there is room again, stand by themselves
                os.ftruncate(self._descriptor, self._length)
            if self._complain is not None:
                self._complain(error.strerror or str(error))
                self._complain = None
            return False
        self._length += len(line)
        return True

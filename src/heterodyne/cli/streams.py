"""The standard streams as a command needs them, whatever it was started with."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, cast

__all__ = ["output_may_be_lost", "prepare_streams"]


def prepare_streams() -> None:
    """Let nothing that is wrong with the standard streams end a run.

    One that is closed (``2>&-``) leads nowhere: else the next file that is opened would take its number, and be written to by whoever
    writes there. Letters that an encoding lacks are replaced. Progress that cannot be written (a full disk, a pipe whose reader has gone)
    is lost.
    """
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open(mode, encoding="utf-8"))  # noqa: SIM115  # until the process ends
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors="replace" if stream is sys.stdout else "backslashreplace")
    sys.stderr = cast(Any, _Unimportant(sys.stderr))


@contextmanager
def output_may_be_lost() -> Iterator[None]:
    """While the block runs, tables that cannot be written are lost: a full disk or a pager that was closed must not end a run."""
    stream = sys.stdout
    sys.stdout = cast(Any, _Unimportant(stream))
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stdout = stream


class _Unimportant:
    """A stream of which what cannot be written is lost."""

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except OSError:
            return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError:
            return

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

"""Where tables and progress are printed."""

from __future__ import annotations

from typing import TextIO

from rich.console import Console

__all__ = ["console_on"]

_WIDTH, _HEIGHT = 80, 25


def console_on(stream: TextIO) -> Console:
    """Rich's console on a stream; of the usual size where COLUMNS or LINES is no number, on which rich fails."""
    try:
        return Console(file=stream)
    except ValueError:
        return Console(file=stream, width=_WIDTH, height=_HEIGHT)

"""Where tables and progress are printed."""

from __future__ import annotations

from typing import TextIO

from rich.console import Console

__all__ = ["console_on"]

_WIDTH, _HEIGHT, _WIDEST = 80, 25, 1000


def console_on(stream: TextIO) -> Console:
    """Rich's console on a stream; of the usual size where COLUMNS or LINES is no number, or one that no terminal has."""
    try:
        console = Console(file=stream)
    except ValueError:  # rich takes every digit of Unicode for one of a number
        console = None
    if console is None or console.width > _WIDEST:
        return Console(file=stream, width=_WIDTH, height=_HEIGHT)
    return console

"""A mark in the environment by which every process below a launcher is found again, whatever session it moved to.

A process group loses those who leave it (a nested launcher, a daemon); parents lose those whose parent died. What a
process was started with, it keeps. Nested launchers add their mark to the one that they bear themselves, so the outer
one finds all.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator, Mapping

import psutil

__all__ = ["VARIABLE", "marked_environment", "marked_processes", "new_mark"]

VARIABLE = "HETERODYNE_WORKER_OF"


def new_mark() -> str:
    """A mark that no other launcher has."""
    return f"{os.getpid()}-{secrets.token_hex(8)}"


def marked_environment(mark: str, environment: Mapping[str, str]) -> dict[str, str]:
    """The environment with the mark added to those that it bears already."""
    outer = environment.get(VARIABLE)
    return {**environment, VARIABLE: mark if not outer else f"{outer}:{mark}"}


def marked_processes(mark: str) -> Iterator[psutil.Process]:
    """The running processes that bear the mark, in no order; never the caller itself."""
    for process in psutil.process_iter():
        if process.pid == os.getpid():
            continue
        try:
            if mark in process.environ().get(VARIABLE, "").split(":"):
                yield process
        except (psutil.Error, OSError):  # gone meanwhile, or another user's
            continue

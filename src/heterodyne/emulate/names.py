"""Names of what an emulation leaves in the system while it runs, by which leftovers of a killed one are recognised."""

from __future__ import annotations

import os
import re
from pathlib import Path

import psutil

__all__ = ["is_leftover", "name_of"]

_OURS = re.compile(r"^heterodyne-([0-9]+)-([0-9]+)-[a-z0-9]+$")


def name_of(part: int | str) -> str:
    """The name of a part of this process's emulation: ``heterodyne-<pid namespace>-<pid>-<part>``."""
    return f"heterodyne-{_namespace()}-{os.getpid()}-{part}"


def is_leftover(name: str) -> bool:
    """Return whether the name is one of ours whose maker is dead.

    The maker's number means nothing in another namespace of processes, so names of other containers are never ours.
    """
    match = _OURS.match(name)
    return match is not None and int(match[1]) == _namespace() and not psutil.pid_exists(int(match[2]))


def _namespace() -> int:
    try:
        return Path("/proc/self/ns/pid").stat().st_ino
    except OSError:  # not Linux
        return 0

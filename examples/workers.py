"""Lets an example run by itself: started by hand, it starts itself once more on unequal workers of this machine."""

from __future__ import annotations

import os
import sys


def on_unequal_workers(*speeds: float) -> None:
    """Go on as one of the workers; as a plain process, become ``heterodyne emulate`` with one worker a speed."""
    if "RANK" in os.environ:
        return
    told = ",".join(map(str, speeds))
    print(f"emulating {len(speeds)} workers with {told} of a core each", flush=True)
    emulate = [sys.executable, "-m", "heterodyne", "emulate", "--speeds", told, "--", sys.executable, *sys.argv]
    os.execv(emulate[0], emulate)


def world_size() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))

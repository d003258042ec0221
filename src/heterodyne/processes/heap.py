"""Memory of this process that nothing uses any more, back to the system."""

from __future__ import annotations

import ctypes
import gc
import sys

__all__ = ["give_back_memory"]


def give_back_memory() -> None:
    """What was freed stays in the heap of a process; a C library that can (glibc) gives it back to the system."""
    gc.collect()
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)

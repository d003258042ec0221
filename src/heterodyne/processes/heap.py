"""Memory of this process: what nothing uses any more goes back to the system, and the most that was in use is counted again."""

from __future__ import annotations

import ctypes
import gc
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

__all__ = [
    "forget_high_water_mark",
    "give_back_memory",
    "high_water_mark_bytes",
    "keep_freed_memory",
    "only_new_garbage",
    "trim_heap",
]

_PROCESS = Path("/proc/self")
_RESET_HIGH_WATER_MARK = "5"  # proc(5), clear_refs
_HIGH_WATER_MARK = re.compile(r"^VmHWM:\s+(\d+) kB$", re.MULTILINE)


def give_back_memory() -> None:
    """Give what was freed back to the system, where the C library can (glibc); else it stays in the heap of the process."""
    gc.collect()
    trim_heap()


@contextmanager
def only_new_garbage() -> Iterator[None]:
    """While the block runs, garbage is looked for only among what it makes: torch and its compiler are some 350,000 objects, which stay.

    Whatever the program has frozen by itself (`gc.freeze`) stays frozen.
    """
    if gc.get_freeze_count():
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def trim_heap() -> None:
    """The same of what is freed already, without looking for circles."""
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)


def forget_high_water_mark() -> bool:
    """Count the highest resident size of this process again from here; False where the system cannot."""
    try:
        (_PROCESS / "clear_refs").write_text(_RESET_HIGH_WATER_MARK)
    except OSError:
        return False
    return True


def high_water_mark_bytes() -> int | None:
    """The highest resident size of this process; None where the system does not tell."""
    try:
        found = _HIGH_WATER_MARK.search((_PROCESS / "status").read_text())
    except OSError:
        return None
    return None if found is None else int(found[1]) * 1024


# The C heap of a worker that computes on the CPU: what was freed is kept for the next tensor.
#
# glibc gives large blocks back to the kernel when they are freed, and asks for them again in the next micro-batch; then each page is
# made and zeroed anew: time that a weak worker has not got, and not in every step alike. Kept, the heap stays as large as the most that
# was ever needed, which is what memory is planned for anyway.
# <malloc.h> of glibc
_TRIM_THRESHOLD: Final = -1
_MMAP_THRESHOLD: Final = -3
_NEVER: Final = -1
_LARGEST: Final = 32 * 2**20  # larger blocks glibc maps one by one, whatever it is told


def keep_freed_memory() -> bool:
    """Tell this process's allocator. False, and nothing has changed, where there is no glibc."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError, TypeError):
        return False
    return bool(mallopt(_MMAP_THRESHOLD, _LARGEST) and mallopt(_TRIM_THRESHOLD, _NEVER))

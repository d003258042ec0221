"""The C heap of a worker that computes on the CPU: what was freed is kept for the next tensor.

glibc gives large blocks back to the kernel when they are freed, and asks for them again in the next micro-batch; then each page is
made and zeroed anew: time that a weak worker has not got, and not in every step alike. Kept, the heap stays as large as the most that
was ever needed, which is what memory is planned for anyway.
"""

from __future__ import annotations

import ctypes
from typing import Final

__all__ = ["keep_freed_memory"]

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

"""The memory through which processes that read ahead hand over samples: missing or full, it is reported as such."""

from __future__ import annotations

__all__ = ["no_shared_room"]


def no_shared_room(error: BaseException) -> str:
    """Return what to do, if that is what PyTorch failed for; else ""."""
    text = str(error)
    if "shared memory" not in text and "torch_shm_manager" not in text:
        return ""
    return (
        "\nthe shared memory (/dev/shm), through which processes that read ahead hand over samples, is full, missing or not writable: make "
        "it larger (docker run --shm-size=8g; mount -o remount,size=8g /dev/shm), remove what others left in it, or set workers to 0, "
        "which reads in the process of the rank"
    )

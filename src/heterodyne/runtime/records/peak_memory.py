"""The most memory that training has used, counted from the moment that it begins."""

from __future__ import annotations

import resource
import sys

import torch

from heterodyne.processes.heap import forget_high_water_mark, high_water_mark_bytes

__all__ = ["forget_peak_memory", "peak_memory_bytes"]


def forget_peak_memory(device: torch.device) -> None:
    """Count again from here: what planning and measuring used is not what training needs. Where the system cannot, it stays."""
    if device.type != "cpu":
        torch.accelerator.reset_peak_memory_stats(device)
        return
    forget_high_water_mark()


def peak_memory_bytes(device: torch.device) -> int:
    """The most that this process has used: of the device's memory, or, on a CPU, of the host's (the highest resident size)."""
    if device.type != "cpu":
        return int(torch.accelerator.max_memory_allocated(device))
    found = high_water_mark_bytes()
    if found is not None:
        return found
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return resident if sys.platform == "darwin" else resident * 1024

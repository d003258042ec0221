"""The most memory that training has used, counted from the moment that it begins."""

from __future__ import annotations

import re
import resource
import sys
from pathlib import Path

import torch

__all__ = ["forget_peak_memory", "peak_memory_bytes"]

_PROCESS = Path("/proc/self")
_RESET_HIGH_WATER_MARK = "5"  # proc(5), clear_refs
_HIGH_WATER_MARK = re.compile(r"^VmHWM:\s+(\d+) kB$", re.MULTILINE)


def forget_peak_memory(device: torch.device) -> None:
    """Count anew from here: what planning and measuring used is not what training needs. Where the system cannot, it stays."""
    if device.type != "cpu":
        torch.accelerator.reset_peak_memory_stats(device)
        return
    try:
        (_PROCESS / "clear_refs").write_text(_RESET_HIGH_WATER_MARK)
    except OSError:
        return


def peak_memory_bytes(device: torch.device) -> int:
    """The most that this process has used: of the device's memory, or, on a CPU, of the host's (the highest resident size)."""
    if device.type != "cpu":
        return int(torch.accelerator.max_memory_allocated(device))
    try:
        found = _HIGH_WATER_MARK.search((_PROCESS / "status").read_text())
    except OSError:
        found = None
    if found is not None:
        return int(found[1]) * 1024
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return resident if sys.platform == "darwin" else resident * 1024

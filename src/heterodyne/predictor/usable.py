"""What of a device's memory a plan may fill."""

from __future__ import annotations

from heterodyne.cost.memory import MemoryAssumptions
from heterodyne.predictor.constants import constants

__all__ = ["context_bytes", "needed_bytes", "usable_bytes"]

_MOST_GROUPS = 4
"""That a device communicates in: all devices, replicas, tensor-parallel neighbours, a pipeline."""


def usable_bytes(memory_bytes: int, backend: str = "cuda") -> int:
    """Bytes that a plan may allocate on a device of so many, whatever its process groups; below 0 where it has no room for these."""
    return int((memory_bytes - context_bytes(backend)) / (1 + constants().stated.fragments))


def needed_bytes(allocated_bytes: float, backend: str = "cuda") -> float:
    """The inverse: bytes that a device is short of where so many are allocated."""
    return context_bytes(backend) + (1 + constants().stated.fragments) * allocated_bytes


def context_bytes(backend: str = "cuda") -> int:
    """What a process has on its device before it allocates anything; on a processor the framework alone."""
    if backend == "cpu":
        return MemoryAssumptions().context("cpu")
    stated = constants().stated
    return round((stated.context_gib + _MOST_GROUPS * stated.communicator_gib) * 2**30)

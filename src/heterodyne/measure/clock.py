"""Clocks: one for work that is over when its call returns, one for accelerators, which run behind the program."""

from __future__ import annotations

import time
from typing import Any, Protocol

import torch

__all__ = ["DeviceClock", "HostClock", "Mark", "ProcessorClock", "Stopwatch", "clock_of"]


# A moment, set by a clock and understood by that clock alone: seconds for one, an event for another.
Mark = Any


class Stopwatch(Protocol):
    def mark(self) -> Mark:
        """This moment, in the order of the device's work."""
        ...

    def seconds(self, start: Mark, end: Mark) -> float:
        """Seconds between two marks; waits until the device has reached the second."""
        ...

    def wait(self) -> None:
        """Return when all work that was given to the device is done."""
        ...


class HostClock:
    """The machine's own clock, for CPU work."""

    def mark(self) -> float:
        return time.perf_counter()

    def seconds(self, start: float, end: float) -> float:
        return end - start

    def wait(self) -> None:
        return


class ProcessorClock(HostClock):
    """Seconds that all threads of this process have computed on processors: it stands still while the process is stopped or waits."""

    def mark(self) -> float:
        return time.process_time()


class DeviceClock:
    """Events on the current stream of an accelerator, so that a mark does not stop it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def mark(self) -> torch.Event:
        event = torch.Event(self._device, enable_timing=True)
        event.record()
        return event

    def seconds(self, start: torch.Event, end: torch.Event) -> float:
        end.synchronize()
        return start.elapsed_time(end) / 1e3

    def wait(self) -> None:
        torch.accelerator.synchronize(self._device)


def clock_of(device: torch.device) -> Stopwatch:
    return HostClock() if device.type == "cpu" else DeviceClock(device)

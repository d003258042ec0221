"""What an asynchronous device has still to do, so that a host that waits for it is not taken for one that works.

The host gives a device work and goes on; where it reads a result it waits, for its own device and for all ranks that this one waits
for. So the end of each action is marked in the device's queue (an event in its current stream). The first mark that the device has not
reached is the action that it is in.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from itertools import count

import torch

__all__ = ["DeviceQueue", "Held"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Held:
    """The action that a device is in, for how many seconds it was seen to be, and how many it has still to do."""

    action: str
    seconds: float
    left: int


class DeviceQueue:
    """Marks of one device. `ended` is called by the thread that gives it work, `held` by another one."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._marks: deque[tuple[int, str, torch.Event]] = deque()
        self._free: list[torch.Event] = []
        self._numbers = count()
        self._stream: torch.Stream | None = None
        self._probe: tuple[int, torch.Event] | None = None
        self._first: int | None = None  # the mark that the device had not reached when it was last looked at
        self._since_s = 0.0

    def ended(self, action: str) -> None:
        """The device was given all of an action. Waits for nothing."""
        while self._marks and self._marks[0][2].query():
            self._free.append(self._marks.popleft()[2])
        event = self._free.pop() if self._free else torch.Event(self._device)
        self._stream = torch.accelerator.current_stream(self._device)
        event.record(self._stream)
        self._marks.append((next(self._numbers), action, event))

    def held(self, now_s: float, action: str | None) -> Held | None:
        """The action that the device is in; None if it has done all that it was given.

        ``action``: that the host is in, which may have given the device work, too; None: it is in none.
        """
        marks = tuple(self._marks)
        for passed, (number, name, event) in enumerate(marks):
            if not event.query():
                return self._held(number, name, now_s, len(marks) - passed)
        if action is not None and self._stream is not None:
            if self._probe is None:
                self._probe = next(self._numbers), torch.Event(self._device)
                self._probe[1].record(self._stream)
            number, event = self._probe
            if not event.query():
                return self._held(number, action, now_s, 0)
            self._probe = None
        self._first = None
        return None

    def _held(self, number: int, action: str, now_s: float, left: int) -> Held:
        if number != self._first:
            self._first, self._since_s = number, now_s
        return Held(action=action, seconds=now_s - self._since_s, left=left)

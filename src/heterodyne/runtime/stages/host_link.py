"""Copies between a device and its host, overlapped with computing.

All of them run on one stream, in call order. Each begins when the device has done what was queued before; the device waits for one where
`Batch.wait` says so, the host never does. Device memory on either end of a copy must stay until the device has waited, which is up to
the caller; pinned memory is kept here until its copy is done.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["Batch", "HostLink", "Readback", "copy"]


def copy(target: Tensor, source: Tensor) -> None:
    """On the current stream."""
    target.copy_(source, non_blocking=True)


class Readback:
    """Numbers of a device on their way to the host: tensors of one element, copied as soon as ``ready`` has come (None: all that the
    device was asked for until now is done).
    """

    def __init__(self, sources: Sequence[Tensor], ready: torch.Event | None = None) -> None:
        self._event: torch.Event | None = None
        device = sources[0].device
        if device.type == "cpu":
            self._numbers = torch.stack(list(sources))
            return
        side = torch.Stream(device)
        side.wait_event(ready or torch.accelerator.current_stream(device).record_event())
        with side:
            self._made: Tensor | None = torch.stack(list(sources))
            self._numbers = torch.empty(self._made.shape, dtype=self._made.dtype, pin_memory=True)
            copy(self._numbers, self._made)
        self._event = side.record_event()

    @property
    def has_come(self) -> bool:
        """Whether they are there."""
        return self._event is None or self._event.query()

    def get(self) -> list[float]:
        """Return them. Waits for what made them, and for nothing that the device was asked for after them."""
        if self._event is not None:
            self._event.synchronize()
            self._event = self._made = None
        found: list[float] = self._numbers.tolist()
        return found


class Batch:
    """Copies that were started together. ``event`` None: they are done."""

    def __init__(self, targets: Sequence[Tensor], device: torch.device, event: torch.Event | None) -> None:
        self._targets: list[Tensor | None] = list(targets)
        self._device = device
        self._event = event

    @property
    def count(self) -> int:
        return len(self._targets)

    def wait(self) -> None:
        """What the device is asked for from now on finds them done."""
        if self._event is not None:
            torch.accelerator.current_stream(self._device).wait_event(self._event)
            self._event = None

    def take(self, number: int) -> Tensor:
        """One of the copies, which is no longer held here."""
        target, self._targets[number] = self._targets[number], None
        assert target is not None  # it is taken once
        return target


class HostLink:
    """Of one device. A CPU is its own host: what goes there is copied at once."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._side = None if device.type == "cpu" else torch.Stream(device)
        self._pinned: deque[tuple[torch.Event, Sequence[Tensor]]] = (
            deque()
        )  # as long as copies into or out of them are not over

    def out(self, sources: Sequence[Tensor]) -> Batch:
        """To pinned memory, which is for `back` alone: the host has not waited for it."""
        pinned = self._side is not None
        targets = [torch.empty(s.shape, dtype=s.dtype, pin_memory=pinned) for s in sources]
        return Batch(targets, self.device, self._hold(self._copy(targets, sources), targets))

    def back(self, sources: Sequence[Tensor]) -> Batch:
        """To the device, into memory of the stream that is current."""
        targets = [torch.empty(s.shape, dtype=s.dtype, device=self.device) for s in sources]
        return Batch(targets, self.device, self._hold(self._copy(targets, sources), sources))

    def _hold(self, event: torch.Event | None, pinned: Sequence[Tensor]) -> torch.Event | None:
        while self._pinned and self._pinned[0][0].query():
            self._pinned.popleft()
        if event is not None:
            self._pinned.append((event, pinned))
        return event

    def _copy(self, targets: Sequence[Tensor], sources: Sequence[Tensor]) -> torch.Event | None:
        if self._side is None:
            for target, source in zip(targets, sources, strict=True):
                target.copy_(source)
            return None
        # What is read has been made by then, and what is written into is no longer used for what was there before.
        self._side.wait_event(torch.accelerator.current_stream(self.device).record_event())
        with self._side:
            for target, source in zip(targets, sources, strict=True):
                copy(target, source)
        return self._side.record_event()

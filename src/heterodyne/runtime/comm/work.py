"""A collective that was started, and when it was over."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future

import torch
import torch.distributed as dist

from heterodyne.errors import WorkerError

__all__ = ["Work", "event_after", "timed_by"]


class Work:
    """A collective that was started. `wait` before its tensor is read; waiting twice does nothing.

    If it is ``timed``, `ended` tells when it was over: seconds of `time.perf_counter` (collectives on the host), or an event of the
    device (those of a device's own backend).
    """

    def __init__(self, finish: Callable[[], object] | None = None, *, timed: bool = False) -> None:
        self._finish = finish
        self._timed = timed
        self._noted: float | torch.Event | None = None
        self._waited = time.perf_counter() if timed and finish is None else None

    @property
    def ended(self) -> float | torch.Event | None:
        """When it was over: as the thread that did it has noted, but not later than when waiting for it ended."""
        if isinstance(self._noted, float) and self._waited is not None:
            return min(self._noted, self._waited)
        return self._waited if self._noted is None else self._noted

    def note_end(self, moment: float | torch.Event) -> None:
        """Called when it is over, by whichever thread knows; or with an event that comes then."""
        self._noted = moment

    def wait(self) -> None:
        """Blocks the host, or orders the device's current stream, until the result is there. Raises WorkerError."""
        finish, self._finish = self._finish, None
        if finish is not None:
            try:
                finish()
            except RuntimeError as error:
                raise WorkerError(f"a collective broke off, so another worker has probably died: {error}") from error
            if self._timed:
                self._waited = time.perf_counter()


def timed_by(pending: Work, future: Future[None], *, timed: bool) -> Work:
    if timed:
        future.add_done_callback(lambda _: pending.note_end(time.perf_counter()))
    return pending


def event_after(work: dist.Work, device: torch.device) -> torch.Event:
    """An event of the device that comes when ``work`` is over, without making the current stream wait for it."""
    end = torch.Event(device, enable_timing=True)
    with torch.Stream(device) as beside:
        work.wait()
        end.record(beside)
    return end

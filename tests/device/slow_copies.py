"""Copies between host and device that take their time, in place of those that are done at once.

A copy is done by a thread when the stream that it is of has come to it, and a while later. What runs on another stream before it is done
sees rubbish, as on a GPU.
"""

from __future__ import annotations

import random
import threading
import time
import weakref
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from device.accelerator import Accelerator

__all__ = ["SlowCopies"]

_RUBBISH = 255  # as bytes of a floating point number: not a number


class SlowCopies:
    """``copy`` stands in for `heterodyne.runtime.stages.host_link.copy`; one thread does what was asked for, in that order, until `close`.

    ``most_s``: of a delay; ``share``: of the copies that have one, the others are done as soon as they can be. ``s_per_byte``:
    that each takes besides.
    ``lost``: ends of copies that were let go of before the copy was done, and before the stream whose memory it is had been told to wait
    for it: on a GPU that memory would be used for something else meanwhile. ``done``: copies; ``delayed``: of them.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        device: torch.device,
        *,
        seed: int,
        most_s: float,
        share: float = 1.0,
        s_per_byte: float = 0.0,
    ) -> None:
        self._queues = accelerator.queues
        self._accelerator = accelerator
        self._device = device
        self._chance = random.Random(seed)
        self._most_s, self._share, self._s_per_byte = most_s, share, s_per_byte
        self._helper = torch.Stream(device)  # waits for nothing
        self._asked: SimpleQueue[tuple[Any, Tensor, Tensor, float] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._work)
        self._thread.start()
        self.lost = 0
        self.done = self.delayed = 0

    def copy(self, target: Tensor, source: Tensor) -> None:
        if target.device == source.device:
            target.copy_(source)
            return
        if not self._s_per_byte:  # else time is what matters, and this would take some
            target.detach().fill_(_RUBBISH)
        index = self._device.index or 0
        operation: Any = SimpleNamespace(
            over=threading.Event(),
            apply=lambda: None,
            communicator=SimpleNamespace(name="copies"),
            deps=[],
            ended_s=0.0,
        )
        operation.deps = self._queues.waited_by_stream(index)
        ticket = self._queues.ticket(operation)
        for end in (target, source):
            weakref.finalize(end, self._let_go, operation, ticket, on_host=end.device.type == "cpu").atexit = False
        own_s = self._s_per_byte * target.nbytes
        delay_s = own_s + self._chance.uniform(0, self._most_s) if self._chance.random() < self._share else own_s
        # Detached tensors hold the memory, so that what is let go of is not a fault of this process.
        self._asked.put((operation, target.detach(), source.detach(), delay_s))
        self._accelerator.stream_wait(index, ticket)

    def _let_go(self, operation: Any, ticket: int, *, on_host: bool) -> None:
        waits = not on_host and ticket in self._accelerator.stream_tickets(self._device.index or 0)
        self.lost += not operation.over.is_set() and not waits

    def _work(self) -> None:
        while (asked := self._asked.get()) is not None:
            operation, target, source, delay_s = asked
            for dep in operation.deps:
                dep.over.wait()
                dep.apply()
            started_s = time.monotonic()
            if delay_s and not self._s_per_byte:
                time.sleep(delay_s)
            with self._helper:
                target.copy_(source)
            if self._s_per_byte:  # the copy itself is a part of what it takes
                time.sleep(max(0.0, started_s + delay_s - time.monotonic()))
            self.delayed += delay_s > 0
            self.done += 1
            operation.deps = []
            operation.ended_s = time.monotonic()
            operation.over.set()
            del asked, target, source

    def close(self) -> None:
        """End the thread, when all is done that was asked for."""
        self._asked.put(None)
        self._thread.join()

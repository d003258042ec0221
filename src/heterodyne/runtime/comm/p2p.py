"""Asynchronous point-to-point communication.

Messages to higher ranks and to lower ranks have separate process groups, so that neither blocks the other: NCCL-like backends order
everything between two ranks. They create a communicator for two ranks at their first call, and the earlier call blocks the host until
the later one; so ranks are joined (`connect`) before receives are posted ahead. Between two ranks, in one direction, messages are
received in the order in which they are sent; backends with tags (gloo) enforce it. Ranks on devices of one platform use its backend;
otherwise tensors go through host memory, by gloo. A sent tensor is released when the send is complete.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from queue import SimpleQueue

import torch
import torch.distributed as dist
from torch import Tensor

from heterodyne.errors import WorkerError

__all__ = ["P2P", "Lane", "RecvWork"]


@dataclass(frozen=True, kw_only=True)
class Lane:
    """How some ranks send to each other. ``upward``: the group for messages to a higher rank, ``downward``: to a lower one.

    ``via_host``: tensors go through host memory. ``told_late``: its works report completion only when they are waited for.
    """

    upward: dist.ProcessGroup
    downward: dist.ProcessGroup
    via_host: bool
    told_late: bool

    def group(self, source: int, to: int) -> dist.ProcessGroup:
        return self.upward if source < to else self.downward


class RecvWork:
    """A pending receive; `wait` returns the tensor."""

    def __init__(self, buffer: Tensor, work: dist.Work | None, device: torch.device) -> None:
        self._buffer = buffer
        self._work = work
        self._device = device

    def wait(self) -> Tensor:
        """The tensor, on this worker's device. Raises WorkerError."""
        if self._work is not None:
            _finish(self._work.wait)
            self._work = None
        return self._buffer.to(self._device, non_blocking=True)


@dataclass(frozen=True, eq=False)
class _SendWork:
    """A pending send, whose tensor must stay; ``left``: done when it is complete, None: ``work`` reports it."""

    work: dist.Work
    tensor: Tensor
    left: Future[object] | None

    @property
    def has_left(self) -> bool:
        """Whether it has, and well: what has gone wrong is told by `wait`."""
        if self.left is None:
            return self.work.is_completed()
        return self.left.done() and self.left.exception() is None

    def wait(self) -> object:
        return self.work.wait() if self.left is None else self.left.result()


class P2P:
    """Sends and receives of one rank.

    Args:
        device: of this worker.
        lanes: of each other rank the way to it.
    """

    def __init__(self, *, rank: int, device: torch.device, lanes: Mapping[int, Lane]) -> None:
        self._rank = rank
        self._device = device
        self._lanes = dict(lanes)
        self._sent: list[_SendWork] = []
        self._waiter = _Waiter() if any(lane.told_late for lane in lanes.values()) else None
        self._counts: dict[tuple[int, int], int] = {}
        self._connected: set[tuple[int, int]] = set()

    def connect(self, others: Iterable[int]) -> None:
        """Join this rank with others, as they do with it; joined pairs stay joined.

        All go through the pairs in one order, that of their ranks, so the first pair that is not joined yet finds both ranks ready.
        """
        pairs = {(min(self._rank, other), max(self._rank, other)) for other in others} - self._connected
        self._connected |= pairs
        for low, high in sorted(pairs):
            for source, to in ((low, high), (high, low)):
                if self._rank == source:
                    self.send(torch.zeros(1, device=self._device), to)
                else:
                    self.receive((1,), torch.float32, source).wait()
        self.settle()

    def send(self, tensor: Tensor, to: int) -> None:
        """Start to send a tensor; it must not be changed before `settle`."""
        lane = self._lanes[to]
        packed = tensor.detach().contiguous()
        if lane.via_host:
            packed = packed.cpu()
        work = dist.isend(packed, dst=to, group=lane.group(self._rank, to), tag=self._tag(self._rank, to))
        if work is not None:
            self._sent = [sent for sent in self._sent if not sent.has_left]
            left = self._waiter.left(work) if self._waiter is not None and lane.told_late else None
            self._sent.append(_SendWork(work, packed, left))

    def receive(self, shape: tuple[int, ...], dtype: torch.dtype, source: int) -> RecvWork:
        """Post a receive for the next message of a rank."""
        lane = self._lanes[source]
        device = torch.device("cpu") if lane.via_host else self._device
        buffer = torch.empty(shape, dtype=dtype, device=device)
        work = dist.irecv(buffer, src=source, group=lane.group(source, self._rank), tag=self._tag(source, self._rank))
        return RecvWork(buffer, work, self._device)

    def settle(self) -> None:
        """Wait until all sends are complete. Raises WorkerError."""
        sent, self._sent = self._sent, []
        for message in sent:
            _finish(message.wait)

    def close(self) -> None:
        """Leave the groups."""
        if self._waiter is not None:
            self._waiter.close()
        for group in dict.fromkeys(group for lane in self._lanes.values() for group in (lane.upward, lane.downward)):
            dist.destroy_process_group(group)
        self._lanes.clear()

    def _tag(self, source: int, to: int) -> int:
        """The number of a message between two ranks; both count."""
        number = self._counts.get((source, to), 0)
        self._counts[source, to] = (number + 1) % 2**30
        return number


class _Waiter:
    """Waits for messages to leave. A daemon: a process that ends does not wait for what never will."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[tuple[dist.Work, Future[object]] | None] = SimpleQueue()
        threading.Thread(target=self._run, name="p2p", daemon=True).start()

    def left(self, work: dist.Work) -> Future[object]:
        """Done when the message has left, or failed."""
        future: Future[object] = Future()
        self._queue.put((work, future))
        return future

    def close(self) -> None:
        """End when all is done that was asked for."""
        self._queue.put(None)

    def _run(self) -> None:
        while (asked := self._queue.get()) is not None:
            work, future = asked
            try:
                future.set_result(work.wait())
            except BaseException as error:  # noqa: BLE001  # raised again by result()
                future.set_exception(error)
            del asked, work, future  # or they would stay until the next message


def _finish(wait: Callable[[], object]) -> None:
    try:
        wait()
    except RuntimeError as error:
        raise WorkerError(f"a message broke off, so another worker has probably died: {error}") from error

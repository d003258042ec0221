"""A channel: collectives among some ranks, whatever their devices are, in the order in which they are asked for.

If all ranks of a channel have their own device of one type, tensors travel by that device's own backend (nccl, xccl; gloo on CPU). Between
unlike devices they go through host memory: copied to a pinned buffer, summed by gloo, copied back. CPU workers of one machine sum `buffers`
of a channel in shared memory.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from heterodyne.errors import WorkerError
from heterodyne.runtime.comm.shared_exchange import SharedExchange
from heterodyne.runtime.comm.shared_memory import SharedBuffers

__all__ = ["Channel", "Work"]

# torch 2.13 has renamed them.
_all_gather_single = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter_single = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


class _TorchWork(Protocol):
    """What torch.distributed gives back for an asynchronous collective."""

    def wait(self) -> bool: ...
    def get_future(self) -> Any: ...


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


class Channel:
    """Collectives between ``ranks``, in one order. Without a group (one rank only) every collective is the identity.

    Tensors lie where the channel `works_on` or, if that is the host, on this worker's device; `all_reduce` needs a contiguous one.
    ``neighbours``: all ranks are CPU workers that can share memory.
    """

    def __init__(
        self,
        ranks: Sequence[int],
        group: dist.ProcessGroup | None,
        *,
        device: torch.device,
        via_host: bool,
        neighbours: bool = False,
    ) -> None:
        self.ranks = tuple(ranks)
        self._group = group
        self._device = device
        self._via_host = via_host
        self._neighbours = neighbours
        self._shared: list[SharedBuffers] = []
        self._exchange: SharedExchange | None = None
        self._exchange_tried = False
        self._thread: ThreadPoolExecutor | None = None
        self._host: dict[tuple[int, torch.dtype], list[Tensor]] = {}

    @property
    def works_on(self) -> torch.device:
        """Where sums are made: a tensor that lies there goes no other way."""
        return torch.device("cpu") if self._via_host else self._device

    def connect(self) -> None:
        """Join the ranks, all at the same time.

        Backends of devices do so in the first collective, which waits on the host until all ranks have come to it. In a step they come in
        orders of their own, and one may have to receive first what another sends after it.
        """
        self.all_reduce(torch.zeros(1, device=self._device)).wait()

    def buffers(self, sizes: Sequence[tuple[int, torch.dtype]]) -> list[Tensor]:
        """Flat buffers of ``(elements, dtype)`` on this worker's device, zero at first, which `all_reduce` sums in the cheapest way.

        Collective, with the same sizes on every rank. They live as long as the channel.
        """
        if self._neighbours and self._group is not None:
            place = dist.get_group_rank(self._group, dist.get_rank())
            shared = SharedBuffers.allocate(sizes, place, self._gather)
            if shared is not None:
                self._shared.append(shared)
                return shared.own
        return [torch.zeros(elements, dtype=dtype, device=self._device) for elements, dtype in sizes]

    @property
    def borrowed_bytes(self) -> int:
        """Bytes of other ranks' memory that this process has mapped and used: resident in it, but theirs."""
        return sum(shared.borrowed_bytes for shared in self._shared)

    def all_reduce(self, tensor: Tensor, *, timed: bool = False) -> Work:
        """Start the sum of ``tensor`` over the ranks, in place. With ``timed``, `Work.ended` is kept."""
        if self._group is None:
            return Work(timed=timed)
        if self._via_host and tensor.device.type != "cpu":
            return self._all_reduce_through_host(tensor, timed=timed)
        if self._shared:
            return self._all_reduce_between_neighbours(tensor, timed=timed)
        work: _TorchWork = dist.all_reduce(tensor, group=self._group, async_op=True)
        pending = Work(work.wait, timed=timed)
        if timed and tensor.device.type == "cpu":
            work.get_future().add_done_callback(lambda _: pending.note_end(time.perf_counter()))
        elif timed:
            pending.note_end(_event_after(work, tensor.device))
        return pending

    def broadcast(self, tensor: Tensor, source: int) -> None:
        """Give every rank the tensor of rank ``source`` (a global rank), in place; blocks. Raises WorkerError."""
        if self._group is None:
            return
        direct = tensor if not self._via_host and tensor.is_contiguous() else tensor.detach().cpu().contiguous()
        dist.broadcast(direct, src=source, group=self._group)
        if direct is not tensor:
            with torch.no_grad():
                tensor.copy_(direct)

    def all_to_all(self, parts: Sequence[Tensor], sizes: Sequence[int]) -> Callable[[], list[Tensor]]:
        """Begin to send the flat ``parts[j]`` to the j-th rank of the channel; what is returned waits for ``sizes[i]`` elements from
        the i-th, and gives them.

        One dtype for all; sizes may be 0, and differ from rank to rank. Several may have begun; the parts must stay as they are until
        they were waited for. Waiting raises WorkerError.
        """
        if self._group is None:
            return lambda: list(parts)
        device = parts[0].device
        if self._neighbours and not self._exchange_tried:
            self._exchange_tried = True
            place = dist.get_group_rank(self._group, dist.get_rank())
            self._exchange = SharedExchange.allocate(len(self.ranks), place, self._gather)
        if self._exchange is not None:
            return self._exchange.all_to_all(parts, sizes)
        sent = torch.cat(list(parts)) if len(parts) > 1 else parts[0].contiguous()
        if self._via_host:
            sent = sent.cpu()
        received = sent.new_empty(sum(sizes))
        in_bytes = _in_bytes(received, sizes, parts)
        work: _TorchWork = dist.all_to_all_single(
            _bytes(received), _bytes(sent), *in_bytes, group=self._group, async_op=True
        )
        pending = Work(work.wait)

        def wait() -> list[Tensor]:
            pending.wait()
            return list(received.to(device).split_with_sizes(list(sizes)))

        return wait

    @property
    def native(self) -> bool:
        """Whether the backend of an accelerator joins the ranks: it has `all_gather` and `reduce_scatter`, of any shares."""
        return self._group is not None and not self._via_host and self._device.type != "cpu"

    def all_gather(self, part: Tensor, sizes: Sequence[int]) -> Callable[[], list[Tensor]]:
        """Begin to give each rank the flat ``part`` of every rank, ``sizes[i]`` elements from the i-th; what is returned waits for them.
        Where the channel is `native`.
        """
        whole = part.new_empty(sum(sizes))
        parts = list(whole.split_with_sizes(list(sizes)))
        if len(set(sizes)) == 1:
            work = _all_gather_single(_bytes(whole), _bytes(part.contiguous()), group=self._group, async_op=True)
        else:
            work = dist.all_gather(
                [_bytes(each) for each in parts], _bytes(part.contiguous()), self._group, async_op=True
            )
        pending = Work(work.wait)

        def wait() -> list[Tensor]:
            pending.wait()
            return parts

        return wait

    def reduce_scatter(self, parts: Sequence[Tensor]) -> Callable[[], Tensor]:
        """Begin to add up the i-th of the flat ``parts`` of all ranks on the i-th; what is returned waits for this rank's. Where the
        channel is `native`.
        """
        total = torch.empty_like(parts[self.ranks.index(dist.get_rank())])
        if len({part.numel() for part in parts}) == 1:
            work = _reduce_scatter_single(total, torch.cat(list(parts)), group=self._group, async_op=True)
        else:
            work = dist.reduce_scatter(total, [part.contiguous() for part in parts], group=self._group, async_op=True)
        pending = Work(work.wait)

        def wait() -> Tensor:
            pending.wait()
            return total

        return wait

    def close(self) -> None:
        """End the thread of this channel, if it has one, and leave the group."""
        if self._thread is not None:
            self._thread.shutdown(wait=True, cancel_futures=True)
        self._shared.clear()
        if self._exchange is not None:
            self._exchange.close()
            self._exchange = None
        if self._group is not None:
            dist.destroy_process_group(self._group)
            self._group = None

    def _gather(self, value: object) -> list[object]:
        values: list[object] = [None] * len(self.ranks)
        dist.all_gather_object(values, value, group=self._group)
        return values

    def _in_order(self) -> ThreadPoolExecutor:
        """One thread: what is sent through a channel keeps its order."""
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="channel")
        return self._thread

    def _all_reduce_between_neighbours(self, tensor: Tensor, *, timed: bool) -> Work:
        add_up = next((add for shared in self._shared if (add := shared.sum_of(tensor)) is not None), None)

        def reduce() -> None:
            if add_up is None:
                dist.all_reduce(tensor, group=self._group)
                return
            dist.barrier(group=self._group)  # all have filled theirs
            add_up()
            dist.barrier(group=self._group)  # all have added up their slice

        future: Future[None] = self._in_order().submit(reduce)
        return _timed(Work(future.result, timed=timed), future, timed=timed)

    def _all_reduce_through_host(self, tensor: Tensor, *, timed: bool) -> Work:
        key = (tensor.numel(), tensor.dtype)
        free = self._host.setdefault(key, [])
        host = free.pop() if free else torch.empty(tensor.numel(), dtype=tensor.dtype, pin_memory=True)
        host.copy_(tensor.view(-1), non_blocking=True)
        copied = torch.Event(tensor.device)
        copied.record()

        def reduce() -> None:
            copied.synchronize()
            dist.all_reduce(host, group=self._group)

        future: Future[None] = self._in_order().submit(reduce)

        def finish() -> None:
            future.result()
            tensor.view(-1).copy_(host, non_blocking=True)
            # The copy back is in the stream before any later use of this buffer, which is again a copy in that stream.
            free.append(host)

        return _timed(Work(finish, timed=timed), future, timed=timed)


def _bytes(tensor: Tensor) -> Tensor:
    """As bytes: not every backend carries every dtype."""
    return tensor.view(torch.uint8)


def _in_bytes(received: Tensor, sizes: Sequence[int], parts: Sequence[Tensor]) -> tuple[list[int], list[int]]:
    each = received.element_size()
    return [size * each for size in sizes], [part.numel() * each for part in parts]


def _timed(pending: Work, future: Future[None], *, timed: bool) -> Work:
    if timed:
        future.add_done_callback(lambda _: pending.note_end(time.perf_counter()))
    return pending


def _event_after(work: _TorchWork, device: torch.device) -> torch.Event:
    """An event of the device that comes when ``work`` is over, without making the current stream wait for it."""
    end = torch.Event(device, enable_timing=True)
    with torch.Stream(device) as beside:
        work.wait()
        end.record(beside)
    return end

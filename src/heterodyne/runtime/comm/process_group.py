"""A process group that may span unlike devices: collectives among some ranks, in call order.

If all ranks have a device of one platform each, tensors use its native backend (nccl, xccl; gloo on CPU). Between unlike devices they go
through host memory: copied to a pinned buffer, reduced by gloo, copied back; what is not small first inside of each island of devices
of one platform, or of CPU workers of one host (`Islands`). CPU workers of one machine reduce the `buffers` of a
process group in shared memory, and exchange ranges of transient tensors there (`share_ranges`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress

import torch
import torch.distributed as dist
from torch import Tensor

from heterodyne.graph.sharding.price import LATENCY_BYTES
from heterodyne.runtime.comm.islands import Islands
from heterodyne.runtime.comm.objects import Objects
from heterodyne.runtime.comm.ring import all_gather_ring, reduce_scatter_ring
from heterodyne.runtime.comm.shared_exchange import SharedExchange
from heterodyne.runtime.comm.shared_memory import SharedBuffers
from heterodyne.runtime.comm.shared_ranges import SharedRanges
from heterodyne.runtime.comm.work import Work, event_after, timed_by

__all__ = ["ProcessGroup"]

Range = tuple[int, int]
"""Elements ``[start, stop)`` of a flat tensor."""

# torch 2.13 has renamed them.
_all_gather_single = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter_single = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


class ProcessGroup:
    """Collectives between ``ranks``, in one order. Without a group (one rank only) every collective is the identity.

    Tensors lie where the process group `works_on` or, if that is the host, on this worker's device; `all_reduce` needs a contiguous one.
    ``neighbours``: all ranks are CPU workers that can share memory. ``islands``: see `Islands`; ``inside``: the process group of this
    rank's island. ``key``: see `Objects`.
    """

    def __init__(
        self,
        ranks: Sequence[int],
        group: dist.ProcessGroup | None,
        *,
        device: torch.device,
        via_host: bool,
        neighbours: bool = False,
        islands: Islands | None = None,
        inside: ProcessGroup | None = None,
        key: bytes = b"",
    ) -> None:
        self.ranks = tuple(ranks)
        self._group = group
        self._device = device
        self._via_host = via_host
        self.neighbours = neighbours and group is not None
        self._islands, self._inside = islands, inside
        self._objects = Objects(group, key)
        self._shared: list[SharedBuffers] = []
        self._rooms: SharedRanges | None = None
        self._exchange: SharedExchange | None = None
        self._exchange_tried = False
        self._thread: ThreadPoolExecutor | None = None
        self._host: dict[tuple[int, torch.dtype], list[Tensor]] = {}

    @property
    def place(self) -> int:
        """The index of this rank among the `ranks`."""
        return self.ranks.index(dist.get_rank()) if self._group is not None else 0

    @property
    def works_on(self) -> torch.device:
        """The device of reductions: a tensor there is not copied."""
        return torch.device("cpu") if self._via_host else self._device

    def connect(self) -> None:
        """Create the backend's communicator, all ranks at the same time.

        Native backends do so in the first collective, which blocks the host until all ranks have reached it. In a step ranks reach it in
        different orders, and one may have to receive first what another sends after it.
        """
        self.all_reduce(torch.zeros(1, device=self._device)).wait()

    def buffers(self, sizes: Sequence[tuple[int, torch.dtype]]) -> list[Tensor]:
        """Flat buffers of ``(elements, dtype)`` on this worker's device, zero at first, which `all_reduce` sums in the cheapest way.

        Collective, with the same sizes on every rank. They live as long as the process group.
        """
        if self._inside is not None:
            return self._inside.buffers(sizes)
        if self.neighbours:
            shared = SharedBuffers.allocate(sizes, self.place, self._objects.gather)
            if shared is not None:
                self._shared.append(shared)
                return shared.own
        return [torch.zeros(elements, dtype=dtype, device=self._device) for elements, dtype in sizes]

    def share_ranges(self, largest: int) -> None:
        """Let CPU workers of one machine exchange ranges of transient tensors of about ``largest`` bytes in shared memory. Collective."""
        if self.neighbours and self._rooms is None:
            self._rooms = SharedRanges.allocate(largest, len(self.ranks), self.place, self._objects.gather)

    @property
    def borrowed_bytes(self) -> int:
        """Bytes of other ranks' memory that this process has mapped and used: resident in it, but theirs."""
        rooms = 0 if self._rooms is None else self._rooms.borrowed_bytes
        return rooms + sum(shared.borrowed_bytes for shared in self._shared)

    def all_reduce(self, tensor: Tensor, *, timed: bool = False) -> Work:
        """Start the sum of ``tensor`` over the ranks, in place. With ``timed``, `Work.ended` is kept."""
        if self._group is None:
            return Work(timed=timed)
        if self._islands is not None and tensor.nbytes >= LATENCY_BYTES:
            return self._islands.all_reduce(tensor, self._in_order(), timed=timed)
        if self._via_host and tensor.device.type != "cpu":
            return self._through_host(tensor, lambda host: dist.all_reduce(host, group=self._group), timed=timed)
        if self._shared:
            return self._all_reduce_between_neighbours(tensor, timed=timed)
        work: dist.Work = dist.all_reduce(tensor, group=self._group, async_op=True)
        pending = Work(work.wait, timed=timed)
        if timed and tensor.device.type == "cpu":
            work.get_future().add_done_callback(lambda _: pending.note_end(time.perf_counter()))
        elif timed:
            pending.note_end(event_after(work, tensor.device))
        return pending

    def all_reduce_future(self, tensor: Tensor, then: Callable[[], object]) -> torch.futures.Future[Tensor]:
        """Start the sum of ``tensor`` over the ranks, in place; the future, as communication hooks of DDP return it, gives the tensor.

        ``then`` is called, by whichever thread knows, when the sum is there.
        """

        def summed(_: object) -> Tensor:
            then()
            return tensor

        direct = not self._shared and self._islands is None
        if self._group is not None and direct and (tensor.device.type == "cpu" or not self._via_host):
            work: dist.Work = dist.all_reduce(tensor, group=self._group, async_op=True)
            return work.get_future().then(summed)
        devices: list[int | str | torch.device] = [] if tensor.device.type == "cpu" else [tensor.device]
        future: torch.futures.Future[Tensor] = torch.futures.Future(devices=devices)
        if self._group is None:
            future.set_result(summed(None))
            return future
        pending = self.all_reduce(tensor)

        def finish() -> None:
            try:
                pending.wait()
                future.set_result(summed(None))
            except Exception as error:  # noqa: BLE001  # whoever waits for the future raises it
                future.set_exception(error)  # type: ignore[arg-type]  # its stub says a result

        self._in_order().submit(finish)
        return future

    def broadcast(self, tensor: Tensor, source: int) -> None:
        """Give every rank the tensor of rank ``source`` (a global rank), in place; blocks. Raises WorkerError."""
        if self._group is None:
            return
        if self._islands is not None and tensor.nbytes >= LATENCY_BYTES:
            flat = tensor.detach().reshape(-1)
            self._islands.broadcast(flat, self.ranks.index(source), self._in_order()).wait()
            with torch.no_grad():
                tensor.copy_(flat.view(tensor.shape))
            return
        direct = tensor if not self._via_host and tensor.is_contiguous() else tensor.detach().cpu().contiguous()
        dist.broadcast(_bytes(direct.detach().reshape(-1)), src=source, group=self._group)
        if direct is not tensor:
            with torch.no_grad():
                tensor.copy_(direct)

    def all_to_all(self, parts: Sequence[Tensor], sizes: Sequence[int]) -> Callable[[], list[Tensor]]:
        """Begin to send the flat ``parts[j]`` to the j-th rank of the process group; what is returned waits for ``sizes[i]`` elements from
        the i-th, and gives them.

        One dtype for all; sizes may be 0, and differ from rank to rank. Several may have begun; the parts must stay as they are until
        they were waited for. Waiting raises WorkerError.
        """
        if self._group is None:
            return lambda: list(parts)
        device = parts[0].device
        if self.neighbours and not self._exchange_tried:
            self._exchange_tried = True
            self._exchange = SharedExchange.allocate(len(self.ranks), self.place, self._objects.gather)
        if self._exchange is not None:
            return self._exchange.all_to_all(parts, sizes)
        sent = torch.cat(list(parts)) if len(parts) > 1 else parts[0].contiguous()
        if self._via_host:
            sent = sent.cpu()
        received = sent.new_empty(sum(sizes))
        in_bytes = _in_bytes(received, sizes, parts)
        work: dist.Work = dist.all_to_all_single(
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

    def all_gather(self, part: Tensor, sizes: Sequence[int], into: Tensor | None = None) -> Callable[[], list[Tensor]]:
        """Begin to give each rank the flat ``part`` of every rank, ``sizes[i]`` elements from the i-th; what is returned waits for them.
        Where the process group is `native`. ``into``: where they are to lie, one after the other.
        """
        whole = part.new_empty(sum(sizes)) if into is None else into
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

    def reduce_scatter(self, parts: Sequence[Tensor], whole: Tensor | None = None) -> Callable[[], Tensor]:
        """Begin to add up the i-th of the flat ``parts`` of all ranks on the i-th; what is returned waits for this rank's. Where the
        process group is `native`. ``whole``: all parts, if they lie one after the other.
        """
        total = torch.empty_like(parts[self.place])
        if len({part.numel() for part in parts}) == 1:
            whole = torch.cat(list(parts)) if whole is None else whole
            work = _reduce_scatter_single(total, whole, group=self._group, async_op=True)
        else:
            work = dist.reduce_scatter(total, [part.contiguous() for part in parts], group=self._group, async_op=True)
        pending = Work(work.wait)

        def wait() -> Tensor:
            pending.wait()
            return total

        return wait

    def reduce_scatter_ranges(self, flat: Tensor, ranges: Sequence[Range], *, timed: bool = False) -> Work:
        """Start the sums of a flat tensor over the ranks, in place: the i-th range of it on the i-th rank. What else is in it is spoilt.

        The ranges are all of it, and may be empty. From each rank go N - s bytes, where N are all and s its own.
        """
        if self._group is None:
            return Work(timed=timed)
        if self._islands is not None and flat.nbytes >= LATENCY_BYTES:
            return self._islands.reduce_scatter_ranges(flat, ranges, self._in_order(), timed=timed)
        if self.native:
            start, stop = ranges[self.place]
            summed = self.reduce_scatter([flat[low:high] for low, high in ranges], flat)
            return Work(lambda: flat[start:stop].copy_(summed()), timed=timed)
        group = self._group
        add_up = self._found(shared.sum_of(flat, ranges[self.place]) for shared in self._shared)

        def on_host(host: Tensor) -> None:
            if add_up is not None:
                self._all_at_once(add_up)
            elif self._rooms is not None:
                self._rooms.reduce_scatter(host, ranges)
            else:
                reduce_scatter_ring(group, host, ranges)

        return self._ranges_on_host(flat, on_host, timed=timed)

    def all_gather_ranges(
        self, flat: Tensor, ranges: Sequence[Range], *, own: Tensor | None = None, timed: bool = False
    ) -> Work:
        """Start to give every rank the i-th range of the i-th rank's flat tensor, in place. See `reduce_scatter_ranges`.

        ``own``: where this rank's range lies besides, and stays as it is meanwhile: it need not be copied.
        """
        if self._group is None:
            return Work(timed=timed)
        if self._islands is not None and flat.nbytes >= LATENCY_BYTES:
            return self._islands.all_gather_ranges(flat, ranges, self._in_order(), timed=timed)
        if self.native:
            start, stop = ranges[self.place]
            gathered = self.all_gather(
                flat[start:stop].clone() if own is None else own, [high - low for low, high in ranges], flat
            )
            return Work(gathered, timed=timed)
        group = self._group
        copy = self._found(shared.copies_of(flat, ranges) for shared in self._shared)

        def on_host(host: Tensor) -> None:
            if copy is not None:
                self._all_at_once(copy)
            elif self._rooms is not None:
                self._rooms.all_gather(host, ranges)
            else:
                all_gather_ring(group, host, ranges)

        return self._ranges_on_host(flat, on_host, timed=timed)

    def _ranges_on_host(self, flat: Tensor, collective: Callable[[Tensor], None], *, timed: bool) -> Work:
        if flat.device.type != "cpu":
            return self._through_host(flat, collective, timed=timed)
        future: Future[None] = self._in_order().submit(collective, flat)
        return timed_by(Work(future.result, timed=timed), future, timed=timed)

    @staticmethod
    def _found(ways: Iterable[Callable[[], None] | None]) -> Callable[[], None] | None:
        return next((way for way in ways if way is not None), None)

    def _all_at_once(self, do: Callable[[], None]) -> None:
        dist.barrier(group=self._group)  # all have filled theirs
        do()
        dist.barrier(group=self._group)  # all have read what they need

    def close(self) -> None:
        """End the thread of this process group, if it has one, and leave the group."""
        if self._thread is not None:
            self._thread.shutdown(wait=True, cancel_futures=True)
        self._shared.clear()
        if self._rooms is not None:
            self._rooms.close()
            self._rooms = None
        if self._exchange is not None:
            self._exchange.close()
            self._exchange = None
        if self._group is not None:
            with suppress(ValueError):  # whoever left the session first has ended all groups
                dist.destroy_process_group(self._group)
            self._group = None

    def _in_order(self) -> ThreadPoolExecutor:
        """One thread: what is sent through a process group keeps its order."""
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="process-group")
        return self._thread

    def _all_reduce_between_neighbours(self, tensor: Tensor, *, timed: bool) -> Work:
        add_up = self._found(shared.sum_of(tensor) for shared in self._shared)

        def reduce() -> None:
            if add_up is None:
                dist.all_reduce(tensor, group=self._group)
            else:
                self._all_at_once(add_up)

        future: Future[None] = self._in_order().submit(reduce)
        return timed_by(Work(future.result, timed=timed), future, timed=timed)

    def _through_host(self, tensor: Tensor, collective: Callable[[Tensor], object], *, timed: bool) -> Work:
        key = (tensor.numel(), tensor.dtype)
        free = self._host.setdefault(key, [])
        host = free.pop() if free else torch.empty(tensor.numel(), dtype=tensor.dtype, pin_memory=True)
        host.copy_(tensor.view(-1), non_blocking=True)
        copied = torch.Event(tensor.device)
        copied.record()

        def reduce() -> None:
            copied.synchronize()
            collective(host)

        future: Future[None] = self._in_order().submit(reduce)

        def finish() -> None:
            future.result()
            tensor.view(-1).copy_(host, non_blocking=True)
            # The copy back is in the stream before any later use of this buffer, which is again a copy in that stream.
            free.append(host)

        return timed_by(Work(finish, timed=timed), future, timed=timed)


def _bytes(tensor: Tensor) -> Tensor:
    """As bytes: not every backend carries every dtype."""
    return tensor.view(torch.uint8)


def _in_bytes(received: Tensor, sizes: Sequence[int], parts: Sequence[Tensor]) -> tuple[list[int], list[int]]:
    each = received.element_size()
    return [size * each for size in sizes], [part.numel() * each for part in parts]

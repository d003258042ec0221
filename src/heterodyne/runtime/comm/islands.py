"""All-reduce among ranks of several islands, as `heterodyne.plan.islands` describes it.

Inside an island sums go by its own library, or through shared memory; between islands they go from host to host, each rank its part, so
that every rank of an island sends at the same time.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor

from heterodyne.plan.islands import Message, Range, homes_of, inside_ranges, messages_of, shares_by_link
from heterodyne.runtime.comm.work import Work, timed_by

__all__ = ["Inside", "Islands"]

_KEPT = 64  # sizes of tensors whose messages are kept


class Inside(Protocol):
    """The process group of this rank's island."""

    def reduce_scatter_ranges(self, flat: Tensor, ranges: Sequence[Range]) -> Work: ...
    def all_gather_ranges(self, flat: Tensor, ranges: Sequence[Range]) -> Work: ...


class Islands:
    """The islands of a process group.

    Args:
        rank: this one.
        islands: the ranks of each.
        group: gloo's, of all of these ranks, for nothing else.
        up, down: two process groups of this rank's island, since a device's library wants the same order of calls on all ranks; None for an
            island of one.
        bandwidths: of the link of each island, in any unit; None: alike.
    """

    def __init__(
        self,
        rank: int,
        islands: Sequence[Sequence[int]],
        group: dist.ProcessGroup,
        up: Inside | None,
        down: Inside | None,
        bandwidths: Sequence[float] | None = None,
    ) -> None:
        self._rank, self._islands, self._group, self._up, self._down = rank, islands, group, up, down
        self._shares = shares_by_link(bandwidths or [1.0] * len(islands))
        self._own = next(number for number, ranks in enumerate(islands) if rank in ranks)
        self._place = list(islands[self._own]).index(rank)
        self._messages = lru_cache(maxsize=_KEPT)(self._messages_of)

    def all_reduce(self, tensor: Tensor, in_order: ThreadPoolExecutor, *, timed: bool) -> Work:
        """Start the sum of a contiguous tensor over the ranks, in place. ``in_order``: the thread of the process group."""
        flat = tensor.view(-1)
        ranges = inside_ranges(flat.numel(), len(self._islands[self._own]))
        if flat.device.type == "cpu":
            future = in_order.submit(self._on_host, flat, ranges)
            return timed_by(Work(future.result, timed=timed), future, timed=timed)
        start, stop = ranges[self._place]
        reduced = None if self._up is None else self._up.reduce_scatter_ranges(flat, ranges)
        host = torch.empty(stop - start, dtype=flat.dtype, pin_memory=True)
        copied = torch.Event(flat.device)
        if reduced is None:
            host.copy_(flat[start:stop], non_blocking=True)
            copied.record()
        else:
            with torch.Stream(flat.device) as beside:  # so that what is computed meanwhile does not wait
                reduced.wait()
                host.copy_(flat[start:stop], non_blocking=True)
                copied.record(beside)

        def exchange() -> None:
            copied.synchronize()
            self._exchange(host, start, flat.numel())

        future = in_order.submit(exchange)

        def finish() -> None:
            future.result()
            flat[start:stop].copy_(host, non_blocking=True)
            if self._down is not None:
                self._down.all_gather_ranges(flat, ranges).wait()

        return timed_by(Work(finish, timed=timed), future, timed=timed)

    def _on_host(self, flat: Tensor, ranges: Sequence[Range]) -> None:
        if self._up is not None:
            self._up.reduce_scatter_ranges(flat, ranges).wait()
        start, stop = ranges[self._place]
        self._exchange(flat[start:stop], start, flat.numel())
        if self._down is not None:
            self._down.all_gather_ranges(flat, ranges).wait()

    def _exchange(self, own: Tensor, first: int, elements: int) -> None:
        """Turn the sums of this island over a range that begins at ``first`` into those of all; blocks."""
        home, there, back = self._messages(elements)

        def part(message: Message) -> Tensor:
            return own[message.start - first : message.stop - first]

        sent, received = self._begun(there, part, lambda message: torch.empty_like(part(message)))
        begin, end = max(home[0], first), min(home[1], first + own.numel())
        if begin < end:
            total = torch.zeros_like(own[begin - first : end - first])
            for island in range(len(self._islands)):  # in the same order whoever does it
                if island == self._own:
                    total += own[begin - first : end - first]
                for message, tensor, work in received:
                    if message.island == island:
                        work.wait()
                        total[message.start - begin : message.stop - begin] += tensor
            own[begin - first : end - first] = total
        for work in sent:
            work.wait()
        sent, received = self._begun(back, part, part)
        for work in (*sent, *(work for _, _, work in received)):
            work.wait()

    def _begun(
        self, messages: Sequence[tuple[int, Message]], outgoing: _Part, incoming: _Part
    ) -> tuple[list[dist.Work], list[tuple[Message, Tensor, dist.Work]]]:
        """Begin to send and receive what of the messages is this rank's, each under its number."""
        sent, received = [], []
        for tag, message in messages:
            if message.sender == self._rank:
                work = dist.isend(_bytes(outgoing(message)), message.receiver, group=self._group, tag=tag)
                sent.append(cast(dist.Work, work))  # this rank is in the group
            else:
                tensor = incoming(message)
                work = dist.irecv(_bytes(tensor), message.sender, group=self._group, tag=tag)
                received.append((message, tensor, cast(dist.Work, work)))
        return sent, received

    def _messages_of(self, elements: int) -> tuple[Range, list[tuple[int, Message]], list[tuple[int, Message]]]:
        """Return the range whose home this island is, and the messages of this rank with their numbers."""
        homes = homes_of(elements, self._shares)
        own = [
            [(number, each) for number, each in enumerate(messages) if self._rank in (each.sender, each.receiver)]
            for messages in messages_of(self._islands, homes)
        ]
        return homes[self._own], own[0], own[1]


class _Part(Protocol):
    def __call__(self, message: Message) -> Tensor: ...


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.view(torch.uint8)

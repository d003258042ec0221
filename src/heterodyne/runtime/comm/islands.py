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

from heterodyne.plan.islands import Range, Segment, homes_of, inside_ranges, segments_of, shares_by_link
from heterodyne.runtime.comm.ring import chunk_elements
from heterodyne.runtime.comm.work import Work, timed_by

__all__ = ["Inside", "Islands"]

_KEPT = 64  # sizes of tensors whose segments are kept


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
        self._segments = lru_cache(maxsize=_KEPT)(self._segments_of)

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
        """Turn the sums of this island over a range that begins at ``first`` into those of all; blocks.

        Totals are sent back while later sums are on their way, so that links are busy in both directions.
        """
        begun = [
            _Exchange(self._rank, self._own, self._group, own, first, *numbered)
            for numbered in self._segments(elements)
        ]
        for (
            exchange
        ) in begun:  # gloo sends what the receiver has asked for, and such words wait behind what is sent before them
            exchange.receive()
        for exchange in begun:
            exchange.send()
        for exchange in begun:
            exchange.add_up()
        for exchange in begun:
            exchange.finish()

    def _segments_of(self, elements: int) -> list[tuple[int, Segment]]:
        """Return the segments that this rank holds, with their numbers."""
        most = chunk_elements(elements, len(self._islands), 4)
        segments = segments_of(self._islands, homes_of(elements, self._shares), most)
        return [(number, segment) for number, segment in enumerate(segments) if self._rank in segment.holders]


class _Exchange:
    """What this rank does of one segment: it sends the sums of its island and gets the total, or it adds up and sends that back."""

    def __init__(
        self, rank: int, island: int, group: dist.ProcessGroup, own: Tensor, first: int, number: int, segment: Segment
    ) -> None:
        self._island, self._group, self._segment, self._tag = island, group, segment, number
        self._own = own[segment.start - first : segment.stop - first]
        self._others = [each for each in segment.holders if each != rank]
        self._home = segment.holders[segment.home]
        self._received: dict[int, tuple[Tensor, dist.Work]] = {}
        self._works: list[dist.Work] = []

    def receive(self) -> None:
        """Begin to receive: at the home the sums of the other islands, elsewhere the total.

        That comes when the home has what was sent, so that it may take its place.
        """
        if self._segment.home != self._island:
            self._works.append(self._receive(self._own, self._home))
            return
        for other in self._others:
            tensor = torch.empty_like(self._own)
            self._received[other] = tensor, self._receive(tensor, other)

    def send(self) -> None:
        """Begin to send what the home adds up."""
        if self._segment.home != self._island:
            self._works.append(self._send(self._own, self._home))

    def add_up(self) -> None:
        """At the home, add up in the order of the islands, and begin to send the total back."""
        if self._segment.home != self._island:
            return
        total = torch.zeros_like(self._own)
        for island, holder in enumerate(self._segment.holders):
            if island == self._island:
                total += self._own
            else:
                tensor, work = self._received[holder]
                work.wait()
                total += tensor
        self._own.copy_(total)
        self._works += [self._send(self._own, other) for other in self._others]

    def finish(self) -> None:
        for work in self._works:
            work.wait()

    def _send(self, tensor: Tensor, to: int) -> dist.Work:
        return cast(dist.Work, dist.isend(_bytes(tensor), to, group=self._group, tag=self._tag))

    def _receive(self, tensor: Tensor, source: int) -> dist.Work:
        return cast(dist.Work, dist.irecv(_bytes(tensor), source, group=self._group, tag=self._tag))


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.view(torch.uint8)

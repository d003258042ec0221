"""Collectives among ranks of several islands: programs of `heterodyne.plan.islands`, carried out.

Inside an island parts go by its own library, or through shared memory; between islands they go from host to host, each device its part,
and for the workers on the CPUs of a host one of them everything.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from itertools import accumulate
from math import sqrt
from threading import Event
from typing import Any, NamedTuple, Protocol, Self, cast

import torch
import torch.distributed as dist
from torch import Tensor

from heterodyne.graph.sharding.price import LATENCY_BYTES
from heterodyne.plan.islands import (
    Inside,
    Piece,
    Program,
    Range,
    Transfer,
    all_gather,
    all_reduce,
    backwards,
    shares_by_link,
)
from heterodyne.runtime.comm.work import Work, timed_by

__all__ = ["Island", "Islands"]

_KEPT = 64  # programs
_PIECES = 4  # of an all-reduce: what is done inside islands goes on while other pieces are between them
_ASKED = 4  # messages that a rank asks each source for at a time: some are on their way, some are asked for


class Island(Protocol):
    """The process group of this rank's island."""

    def reduce_scatter_ranges(self, flat: Tensor, ranges: Sequence[Range]) -> Work: ...
    def all_gather_ranges(self, flat: Tensor, ranges: Sequence[Range]) -> Work: ...


class Islands:
    """The islands of a process group.

    Args:
        place: of this rank in the process group.
        islands: the places of the ranks of each.
        group: gloo's, of all of these ranks, for nothing else.
        up, down: two process groups of this rank's island, since a device's library wants the same order of calls on all ranks; None for an
            island of one.
        bandwidths: of the link of each island, in bytes a second; None: not known, and taken for alike.
        latency_s: of a message between islands.
        one_link: of each island, whether all its ranks share one link to others; see `heterodyne.plan.islands.all_reduce`.
    """

    def __init__(
        self,
        place: int,
        islands: Sequence[Sequence[int]],
        group: dist.ProcessGroup,
        up: Island | None,
        down: Island | None,
        bandwidths: Sequence[float] | None = None,
        latency_s: float = 0.0,
        one_link: Sequence[bool] | None = None,
    ) -> None:
        self._place, self._islands, self._group, self._up, self._down = place, islands, group, up, down
        self._one_link = one_link
        self._bandwidths = bandwidths or [1.0] * len(islands)
        self._latency_bytes = latency_s * min(bandwidths) if bandwidths and latency_s else LATENCY_BYTES
        self._ranks = sum(map(len, islands))
        self._own = next(number for number, places in enumerate(islands) if place in places)
        self._reduce = lru_cache(maxsize=_KEPT)(self._all_reduce_steps)
        self._gather = lru_cache(maxsize=_KEPT)(self._all_gather_steps)

    def all_reduce(self, tensor: Tensor, in_order: ThreadPoolExecutor, *, timed: bool) -> Work:
        """Start the sum of a contiguous tensor over the ranks, in place. ``in_order``: the thread of the process group."""
        return self._start(self._reduce(tensor.numel(), tensor.element_size()), tensor, in_order, timed=timed)

    def reduce_scatter_ranges(
        self, flat: Tensor, ranges: Sequence[Range], in_order: ThreadPoolExecutor, *, timed: bool
    ) -> Work:
        """See `ProcessGroup.reduce_scatter_ranges`."""
        return self._start(self._gather(tuple(ranges), flat.element_size(), back=True), flat, in_order, timed=timed)

    def all_gather_ranges(
        self, flat: Tensor, ranges: Sequence[Range], in_order: ThreadPoolExecutor, *, timed: bool
    ) -> Work:
        """See `ProcessGroup.all_gather_ranges`."""
        return self._start(self._gather(tuple(ranges), flat.element_size()), flat, in_order, timed=timed)

    def broadcast(self, flat: Tensor, place: int, in_order: ThreadPoolExecutor) -> Work:
        """Start to give every rank the flat tensor of the rank at ``place``, in place."""
        end = flat.numel()
        ranges = [(0, 0) if each < place else (0, end) if each == place else (end, end) for each in range(self._ranks)]
        return self.all_gather_ranges(flat, ranges, in_order, timed=False)

    def _all_reduce_steps(self, elements: int, element_bytes: int) -> _Steps:
        most = self._most(elements, element_bytes)
        pieces = min(_PIECES, max(1, elements // (most * len(self._islands))))
        shares = shares_by_link(self._bandwidths)
        return self._steps(all_reduce(self._islands, elements, shares, most, pieces, self._one_link))

    def _all_gather_steps(self, ranges: Sequence[Range], element_bytes: int, *, back: bool = False) -> _Steps:
        most = self._most(max(stop for _, stop in ranges), element_bytes)
        program = all_gather(self._islands, ranges, most, self._bandwidths, self._one_link)
        return self._steps(backwards(program) if back else program)

    def _steps(self, program: Program) -> _Steps:
        tags = accumulate((len(piece.transfers) for piece in program), initial=0)
        return _Steps(program, [_Duties.of(piece, self._place, tag) for tag, piece in zip(tags, program, strict=False)])

    def _most(self, elements: int, element_bytes: int) -> int:
        """Return of how many elements a message is.

        N bytes in messages of c bytes take N / c latencies, and in the end each of G islands waits for one message of each: least for
        c = sqrt(N L / G) where L bytes could be sent in one latency. Fewer than L would not keep a link busy.
        """
        size = max(self._latency_bytes, sqrt(elements * element_bytes * self._latency_bytes / len(self._islands)))
        return max(1, round(size / element_bytes))

    def _start(self, steps: _Steps, tensor: Tensor, in_order: ThreadPoolExecutor, *, timed: bool) -> Work:
        flat = tensor.view(-1)
        run = _Run if flat.device.type == "cpu" else _RunOfDevice
        started = run(steps, self._place, self._own, self._group, flat, self._up, self._down)
        future = in_order.submit(started.exchange)

        def finish() -> None:
            future.result()
            started.finish()

        return timed_by(Work(finish, timed=timed), future, timed=timed)


class _Message(NamedTuple):
    tag: int
    transfer: Transfer


class _Duties(NamedTuple):
    """What a rank sends and receives of a piece.

    Args:
        first: what it sends of its own.
        in_turn: what it adds up or hands on, in this order, and what it sends of that.
        last: what it only has to have in the end.
    """

    first: list[_Message]
    in_turn: list[_Message]
    last: list[_Message]

    @classmethod
    def of(cls, piece: Piece, place: int, first_tag: int) -> Self:
        own = [_Message(tag, t) for tag, t in enumerate(piece.transfers, first_tag) if place in (t.source, t.target)]
        received = {
            m.transfer.start: m.tag for m in reversed(own) if m.transfer.target == place
        }  # the first of a segment
        sent = {m.transfer.start: m.tag for m in own if m.transfer.source == place}  # the last of a segment
        made = cls([], [], [])
        for message in own:
            tag, transfer = message
            if transfer.source == place:
                (made.first if received.get(transfer.start, tag) >= tag else made.in_turn).append(message)
            else:
                handed_on = transfer.adds or sent.get(transfer.start, tag) > tag
                (made.in_turn if handed_on else made.last).append(message)
        return made


class _Steps(NamedTuple):
    """A program, and what a rank does of each piece."""

    program: Program
    duties: list[_Duties]


class _Run:
    """A program on a flat tensor of the host.

    gloo sends what the receiver has asked for, and a rank asks for few messages at a time. So of several ranks that share a link none keeps
    the others waiting, and what is asked for does not wait behind what is sent the other way.
    """

    def __init__(
        self,
        steps: _Steps,
        place: int,
        island: int,
        group: dist.ProcessGroup,
        flat: Tensor,
        up: Island | None,
        down: Island | None,
    ) -> None:
        self._program, self._duties = steps
        self._place, self._island, self._group = place, island, group
        self._flat, self._up, self._down = flat, up, down
        self._ranks = dist.get_process_group_ranks(group)
        self._waiting: dict[tuple[int, bool], deque[_Message]] = {}  # by source and by whether they are the last duties
        self._begun: dict[int, tuple[Tensor, dist.Work]] = {}
        self._works: list[dist.Work] = []
        self._inside: list[Work] = []

    def exchange(self) -> None:
        """Carry out everything but what `finish` does; blocks."""
        self._reduce_inside()
        self._ask_first()
        added_up = [Event() for _ in self._duties]
        with ThreadPoolExecutor(1, thread_name_prefix="islands") as beside:
            try:
                rest = beside.submit(self._receive_rest, added_up)
                for number, duties in enumerate(self._duties):
                    self._summed(number)
                    for message in duties.first:
                        self._send(message)
                for done, duties in zip(added_up, self._duties, strict=True):
                    for message in duties.in_turn:
                        if message.transfer.target == self._place:
                            self._receive(message)
                        else:
                            self._send(message)
                    done.set()
            finally:
                for done in added_up:
                    done.set()
            rest.result()
        for work in self._works:
            work.wait()

    def _receive_rest(self, added_up: Sequence[Event]) -> None:
        """Receive what no other rank waits for: in a thread of its own, since what is added up shall not wait for it."""
        for number, done in enumerate(added_up):
            for message in self._duties[number].last:
                self._receive(message, last=True)
            done.wait()
            self._arrived(number)

    def finish(self) -> None:
        """Wait for what goes on inside of the island; called by whoever waits for the collective."""
        for work in self._inside:
            work.wait()

    def _reduce_inside(self) -> None:
        """Start what is done inside of the island first."""
        if self._up is not None:
            parts = [[self._part(step) for step in piece.up] for piece in self._program]
            self._added = [[self._up.reduce_scatter_ranges(*part) for part in of] for of in parts]

    def _ask_first(self) -> None:
        for last in (False, True):
            for message in (each for duties in self._duties for each in (duties.last if last else duties.in_turn)):
                if message.transfer.target == self._place:
                    self._waiting.setdefault((message.transfer.source, last), deque()).append(message)
        for source in self._waiting:
            for _ in range(_ASKED):
                self._ask(source)

    def _ask(self, source: tuple[int, bool]) -> None:
        if self._waiting[source]:
            tag, transfer = self._waiting[source].popleft()
            own = self._on_host(transfer)
            into = torch.empty_like(own) if transfer.adds else own
            work = dist.irecv(_bytes(into), self._ranks[transfer.source], group=self._group, tag=tag)
            self._begun[tag] = into, cast(dist.Work, work)

    def _receive(self, message: _Message, *, last: bool = False) -> None:
        received, work = self._begun.pop(message.tag)
        work.wait()
        self._ask((message.transfer.source, last))
        if message.transfer.adds:
            self._on_host(message.transfer).add_(received)

    def _send(self, message: _Message) -> None:
        tensor, to = _bytes(self._on_host(message.transfer)), self._ranks[message.transfer.target]
        self._works.append(cast(dist.Work, dist.isend(tensor, to, group=self._group, tag=message.tag)))

    def _part(self, step: Inside) -> tuple[Tensor, list[Range]]:
        ranges = [(low - step.start, high - step.start) for low, high in step.ranges[self._island]]
        return self._flat[step.start : step.stop], ranges

    def _on_host(self, transfer: Transfer) -> Tensor:
        return self._flat[transfer.start : transfer.stop]

    def _summed(self, piece: int) -> None:
        """Wait until what is added up inside is on the host."""
        for work in self._added[piece] if self._up is not None else ():
            work.wait()

    def _arrived(self, piece: int) -> None:
        """All that this rank has of a piece is on the host."""
        if self._down is not None:
            self._inside += [self._down.all_gather_ranges(*self._part(step)) for step in self._program[piece].down]


class _RunOfDevice(_Run):
    """A program on a flat tensor of a device: what other islands get is copied to the host, and what comes is copied back."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        ranges = {each.transfer[:2] for duties in self._duties for of in duties for each in of}
        offsets = accumulate((stop - start for start, stop in sorted(ranges)), initial=0)
        self._offsets = dict(zip(sorted(ranges), offsets, strict=False))
        elements = sum(stop - start for start, stop in ranges)
        self._host = torch.empty(elements, dtype=self._flat.dtype, pin_memory=True)
        self._copied = torch.Event(self._flat.device)
        super()._reduce_inside()
        if self._up is None:
            self._copy()
            self._copied.record()
        else:
            with torch.Stream(self._flat.device) as beside:  # so that what is computed meanwhile does not wait
                for piece in range(len(self._program)):
                    super()._summed(piece)
                self._copy()
                self._copied.record(beside)

    def finish(self) -> None:
        self._copy(back=True)
        for piece in range(len(self._program)):
            super()._arrived(piece)
        super().finish()

    def _copy(self, *, back: bool = False) -> None:
        for start, stop in self._offsets:
            device, host = self._flat[start:stop], self._elements(start, stop)
            (device if back else host).copy_(host if back else device, non_blocking=True)

    def _elements(self, start: int, stop: int) -> Tensor:
        offset = self._offsets[start, stop]
        return self._host[offset : offset + stop - start]

    def _on_host(self, transfer: Transfer) -> Tensor:
        return self._elements(transfer.start, transfer.stop)

    def _reduce_inside(self) -> None:
        self._copied.synchronize()

    def _summed(self, piece: int) -> None: ...

    def _arrived(self, piece: int) -> None: ...


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.view(torch.uint8)

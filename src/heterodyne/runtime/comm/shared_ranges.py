"""Reduce-scatter and all-gather of unequal ranges between the processes of one machine, through rooms that all of them see.

Tensors that come and go (gathered parameters, the gradients of a stage) lie in no memory that is shared. So each rank has a room of two
halves: it puts a piece of what the others need into one half, all meet, and each takes what it needs out of the rooms of the others; the
next piece goes into the other half, and when all have met once more nobody reads the first one any longer. A gathered byte is copied into
a room once and out of it once by each rank; of a sum each rank adds up its own range alone, in order of rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from heterodyne.plan.buckets import room_bytes
from heterodyne.runtime.comm.meeting import Meeting
from heterodyne.runtime.comm.shared_memory import SharedBuffers, add_up

__all__ = ["SharedRanges"]

Gather = Callable[[object], list[object]]
Range = tuple[int, int]


class SharedRanges:
    """Made by `allocate`. ``rooms``: of every rank, in bytes; this one is at ``place``."""

    def __init__(self, place: int, rooms: Sequence[Tensor], meeting: Meeting) -> None:
        self._place = place
        self._halves = list(zip(*(room.chunk(2) for room in rooms), strict=True))
        self._meeting = meeting
        self._turn = 0
        self._read = 0

    @classmethod
    def allocate(cls, largest: int, places: int, place: int, gather: Gather) -> SharedRanges | None:
        """For tensors of up to ``largest`` bytes, and longer ones in more pieces; None, on every rank alike, if one of them cannot.

        Collective, with the same ``largest`` on every rank.
        """
        shared = SharedBuffers.allocate([(room_bytes(largest, places), torch.uint8)], place, gather)
        meeting = None if shared is None else Meeting.allocate(places, place, gather)
        if shared is None or meeting is None:
            return None
        return cls(place, shared.of_all(0), meeting)

    @property
    def borrowed_bytes(self) -> int:
        """Bytes of other ranks' rooms that are in this process's resident size, though they are not its own."""
        return 2 * self._read

    def all_gather(self, flat: Tensor, ranges: Sequence[Range]) -> None:
        """Give every rank the range of each, in place; blocks. Raises WorkerError."""
        most = self._elements(flat)
        low, high = ranges[self._place]
        longest = max(stop - start for start, stop in ranges)
        for begin in range(0, longest, most):
            own = flat[low + begin : min(high, low + begin + most)]
            rooms = self._next(flat.dtype)
            rooms[self._place][: own.numel()].copy_(own)
            self._meeting.meet()
            for place, (start, stop) in enumerate(ranges):
                piece = flat[start + begin : min(stop, start + begin + most)]
                if place != self._place and start + begin < stop:
                    piece.copy_(rooms[place][: piece.numel()])
            self._read = max(self._read, (len(ranges) - 1) * min(longest, most) * flat.element_size())

    def reduce_scatter(self, flat: Tensor, ranges: Sequence[Range]) -> None:
        """Add up ``flat`` over the ranks, each range of it on the rank at its place; blocks. Raises WorkerError."""
        for pieces in _pieces(ranges, self._elements(flat)):
            rooms = self._next(flat.dtype)
            offset = 0
            for place, (start, stop) in enumerate(pieces):
                if place == self._place:
                    own, mine = flat[start:stop], offset
                else:
                    rooms[self._place][offset : offset + stop - start].copy_(flat[start:stop])
                offset += stop - start
            self._meeting.meet()
            if own.numel():
                parts = [room[mine : mine + own.numel()] for room in rooms]
                parts[self._place] = own
                add_up(parts, [own])
                self._read = max(self._read, (len(ranges) - 1) * own.nbytes)

    def _elements(self, like: Tensor) -> int:
        """So many of a tensor go into half a room."""
        return int(self._halves[0][0].numel()) // like.element_size()

    def _next(self, dtype: torch.dtype) -> list[Tensor]:
        """The halves of all rooms that are free, as elements of that dtype."""
        self._turn = 1 - self._turn
        return [half.view(dtype) for half in self._halves[self._turn]]

    def close(self) -> None:
        self._meeting.close()


def _pieces(ranges: Sequence[Range], most: int) -> Iterator[list[Range]]:
    """All of the ranges, a piece of each at a time, so that all ranks have as much to add up in relation to what they have in all."""
    total = sum(stop - start for start, stop in ranges)
    turns = -(-total // max(1, most - len(ranges)))  # a piece may be one longer than its part of the room
    for turn in range(turns):
        yield [
            (start + (stop - start) * turn // turns, start + (stop - start) * (turn + 1) // turns)
            for start, stop in ranges
        ]

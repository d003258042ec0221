"""All-to-alls between the processes of one machine, through memory that both ends see.

Each rank has two slots for each other one. To send, it copies a piece into a slot and says so; the other copies it out and says that the
slot is free. What is said is a byte in a pipe, so whoever waits sleeps, and takes no processor time from others. Pieces of all pairs
are on their way at the same time. Several exchanges may have begun: between two ranks their pieces keep the order in which they began,
and they move on whenever this process begins or awaits any of them.
"""

from __future__ import annotations

import mmap
import os
import select
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from heterodyne.errors import WorkerError
from heterodyne.runtime.comm.shared_memory import make_memory, open_memory

__all__ = ["SharedExchange"]

_PIECE_BYTES = 2**20
_SLOTS = 2
_READY, _FREE = b"r", b"f"

Gather = Callable[[object], list[object]]


class _Peer:
    """The way to and from one other rank: ``into`` and ``out_of`` are the slots, ``tell`` and ``hear`` the ends of pipes."""

    def __init__(self, into: Sequence[Tensor], out_of: Sequence[Tensor], tell: int, hear: int) -> None:
        self.into, self.out_of, self.tell, self.hear = into, out_of, tell, hear
        self.free = _SLOTS  # slots that may be filled
        self.filled = 0  # slots that the other one has filled and that were not emptied
        self.next_in = self.next_out = 0

    def listen(self) -> None:
        """Take in what was said. Raises WorkerError if the other one is gone."""
        said = os.read(self.hear, 64)
        if not said:
            raise WorkerError("a collective broke off, so another worker has probably died: its pipe is closed")
        self.filled += said.count(_READY)
        self.free += said.count(_FREE)

    def say(self, what: bytes) -> None:
        try:
            os.write(self.tell, what)
        except BrokenPipeError as error:
            raise WorkerError(f"a collective broke off, so another worker has probably died: {error}") from error


@dataclass(eq=False)
class _Exchange:
    """One all-to-all: what is sent to whom and what comes from whom, as bytes, and how far it is with each where that is not all."""

    sent: Sequence[Tensor]
    arrived: Sequence[Tensor]
    out: dict[int, int]
    into: dict[int, int]

    @property
    def over(self) -> bool:
        return not self.out and not self.into


class SharedExchange:
    """Made by `allocate`, collectively."""

    def __init__(self, place: int, peers: dict[int, _Peer]) -> None:
        self._place = place
        self._peers = peers
        self._begun: deque[_Exchange] = deque()
        self._poll = select.poll()
        self._by_end = {peer.hear: number for number, peer in peers.items()}
        for peer in peers.values():
            self._poll.register(peer.hear, select.POLLIN | select.POLLHUP)

    @classmethod
    def allocate(cls, places: int, place: int, gather: Gather) -> SharedExchange | None:
        """Between that many ranks, of which this is the ``place``-th; None, on every rank alike, if one of them cannot."""
        made = make_memory(places * _SLOTS * _PIECE_BYTES)
        pipes = {peer: os.pipe() for peer in range(places) if peer != place}
        own = None if made is None else (f"/proc/{os.getpid()}/fd", made[1], {p: ends[1] for p, ends in pipes.items()})
        peers: dict[int, _Peer] = {}
        try:
            for peer, told in enumerate(gather(own)):
                found = None
                if made is not None and peer != place:
                    found = _open_peer(made[0], peer, told, place, pipes[peer][0])
                if found is not None:
                    peers[peer] = found
            everywhere = all(gather(len(peers) == places - 1))
        finally:
            # Only the others hold the ends that they write into, so that it is heard when they are gone.
            for _, write in pipes.values():
                os.close(write)
            if made is not None:
                os.close(made[1])
        if everywhere:
            return cls(place, peers)
        for read, _ in pipes.values():
            os.close(read)
        for found in peers.values():
            os.close(found.tell)
        return None

    def all_to_all(self, parts: Sequence[Tensor], sizes: Sequence[int]) -> Callable[[], list[Tensor]]:
        """As `Channel.all_to_all`: flat parts of one dtype, a part for each rank; ``sizes``: elements from each.

        Begins it, and returns what waits for what has come. Until then the parts must stay as they are.
        """
        sent = [_bytes_of(part) for part in parts]
        received = [torch.empty(size, dtype=parts[0].dtype) for size in sizes]
        arrived = [tensor.view(torch.uint8) for tensor in received]
        exchange = _Exchange(
            sent,
            arrived,
            out={peer: 0 for peer in self._peers if sent[peer].numel()},
            into={peer: 0 for peer in self._peers if arrived[peer].numel()},
        )
        self._begun.append(exchange)
        self._move()
        received[self._place].copy_(parts[self._place])

        def wait() -> list[Tensor]:
            while not exchange.over:
                if not self._move():
                    for end, _ in self._poll.poll():
                        self._peers[self._by_end[end]].listen()
            return received

        return wait

    def _move(self) -> bool:
        """Copy whatever can be copied now. Returns whether there was anything."""
        moved = False
        for number, peer in self._peers.items():
            moved = self._send(number, peer) or moved
            moved = self._receive(number, peer) or moved
        while self._begun and self._begun[0].over:
            self._begun.popleft()
        return moved

    def _send(self, number: int, peer: _Peer) -> bool:
        moved = False
        for exchange in self._begun:
            while peer.free and number in exchange.out:
                piece = _next_piece(exchange.sent[number], exchange.out, number)
                peer.into[peer.next_in][: piece.numel()].copy_(piece)
                peer.next_in = (peer.next_in + 1) % _SLOTS
                peer.free -= 1
                peer.say(_READY)
                moved = True
            if number in exchange.out:
                break
        return moved

    def _receive(self, number: int, peer: _Peer) -> bool:
        moved = False
        for exchange in self._begun:
            while peer.filled and number in exchange.into:
                piece = _next_piece(exchange.arrived[number], exchange.into, number)
                piece.copy_(peer.out_of[peer.next_out][: piece.numel()])
                peer.next_out = (peer.next_out + 1) % _SLOTS
                peer.filled -= 1
                peer.say(_FREE)
                moved = True
            if number in exchange.into:
                break
        return moved

    def close(self) -> None:
        """Close the pipes; the memory goes with the last who has it."""
        for peer in self._peers.values():
            os.close(peer.tell)
            os.close(peer.hear)
        self._peers.clear()


def _open_peer(own: mmap.mmap, peer: int, told: object, place: int, hear: int) -> _Peer | None:
    """The way to a rank that has told where its memory and its pipes are."""
    if not isinstance(told, tuple):
        return None
    folder, memory, ends = told
    other = open_memory(f"{folder}/{memory}", len(own))
    if other is None:
        return None
    try:
        tell = os.open(str(Path(folder) / str(ends[place])), os.O_WRONLY)
    except OSError:
        return None
    return _Peer(_slots(own, peer), _slots(other, place), tell, hear)


def _next_piece(whole: Tensor, reached: dict[int, int], number: int) -> Tensor:
    """The piece that follows what has been copied to or from a rank; of the last one there is no more to note."""
    first = reached[number]
    stop = min(first + _PIECE_BYTES, whole.numel())
    reached[number] = stop
    if stop == whole.numel():
        del reached[number]
    return whole[first:stop]


def _bytes_of(part: Tensor) -> Tensor:
    """The same memory, where it lies in one piece. One element does so whatever its stride, by which a view of bytes is refused."""
    return part.contiguous().as_strided((part.numel(),), (1,)).view(torch.uint8)


def _slots(memory: mmap.mmap, of: int) -> list[Tensor]:
    """The slots in somebody's memory for one rank."""
    return [
        torch.frombuffer(memory, dtype=torch.uint8, count=_PIECE_BYTES, offset=(of * _SLOTS + slot) * _PIECE_BYTES)
        for slot in range(_SLOTS)
    ]

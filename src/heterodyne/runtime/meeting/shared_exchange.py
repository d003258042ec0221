"""All-to-alls between the processes of one machine, through memory that both ends see.

Each rank has two slots for each other one. To send, it copies a piece into a slot and says so; the other copies it out and says that the
slot is free. What is said is a byte in a pipe, so whoever waits sleeps, and takes no processor time from others. Pieces of all pairs
are on their way at the same time.
"""

from __future__ import annotations

import mmap
import os
import select
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from heterodyne.errors import WorkerError
from heterodyne.runtime.meeting.shared_memory import make_memory, open_memory

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


class SharedExchange:
    """Made by `allocate`, collectively."""

    def __init__(self, place: int, peers: dict[int, _Peer]) -> None:
        self._place = place
        self._peers = peers
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

    def all_to_all(self, parts: Sequence[Tensor], sizes: Sequence[int]) -> list[Tensor]:
        """As `Channel.all_to_all`: flat parts of one dtype, a part for each rank; ``sizes``: elements from each."""
        sent = [part.contiguous().view(torch.uint8) for part in parts]
        each = parts[0].element_size()
        received = [torch.empty(size, dtype=parts[0].dtype) for size in sizes]
        arrived = [tensor.view(torch.uint8) for tensor in received]
        received[self._place].copy_(parts[self._place])
        left_out = {peer: 0 for peer in self._peers if sent[peer].numel()}
        left_in = {peer: 0 for peer in self._peers if sizes[peer] * each}
        while left_out or left_in:
            moved = self._send(sent, left_out)
            moved = self._receive(arrived, left_in) or moved
            if not moved:
                for end, _ in self._poll.poll():
                    self._peers[self._by_end[end]].listen()
        return received

    def _send(self, sent: Sequence[Tensor], left: dict[int, int]) -> bool:
        moved = False
        for number in list(left):
            peer, reached, total = self._peers[number], left[number], sent[number].numel()
            while peer.free and reached < total:
                piece = sent[number][reached : reached + _PIECE_BYTES]
                peer.into[peer.next_in][: piece.numel()].copy_(piece)
                peer.next_in = (peer.next_in + 1) % _SLOTS
                peer.free -= 1
                peer.say(_READY)
                reached += piece.numel()
                moved = True
            left[number] = reached
            if reached == total:
                del left[number]
        return moved

    def _receive(self, arrived: Sequence[Tensor], left: dict[int, int]) -> bool:
        moved = False
        for number in list(left):
            peer, reached, total = self._peers[number], left[number], arrived[number].numel()
            while peer.filled and reached < total:
                piece = arrived[number][reached : reached + _PIECE_BYTES]
                piece.copy_(peer.out_of[peer.next_out][: piece.numel()])
                peer.next_out = (peer.next_out + 1) % _SLOTS
                peer.filled -= 1
                peer.say(_FREE)
                reached += piece.numel()
                moved = True
            left[number] = reached
            if reached == total:
                del left[number]
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


def _slots(memory: mmap.mmap, of: int) -> list[Tensor]:
    """The slots in somebody's memory for one rank."""
    return [
        torch.frombuffer(memory, dtype=torch.uint8, count=_PIECE_BYTES, offset=(of * _SLOTS + slot) * _PIECE_BYTES)
        for slot in range(_SLOTS)
    ]

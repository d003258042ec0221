"""Sums between the processes of one machine, through memory that all of them see.

A socket, even the loopback, copies every byte several times through the kernel, and that is processor time which a CPU
worker wants for its model. Here each rank keeps its buffers where the others can see them. To sum one, each rank takes its
own slice of it, adds up what all ranks have there, in order of rank, and writes the sum into all of them: (n-1)/n of the
bytes are read from the others and as many written, once, and every rank has the same bits.

The memory is a Linux memfd: a file without a name, which is gone with the last process that has it, however that ends.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

__all__ = ["SharedBuffers", "add_up", "make_memory", "neighbourhood", "open_memory"]

_ALIGNMENT = 64
_CHUNK_BYTES = 2**18  # a chunk of all ranks stays in the cache between being added up and being written back
_LOW = (torch.bfloat16, torch.float16)

Gather = Callable[[object], list[object]]
Range = tuple[int, int]


def neighbourhood() -> tuple[str, ...] | None:
    """What is equal for processes that can share memory, and reach each other by nothing slower; None where nothing can be shared.

    Processes in different network namespaces are taken for different machines: somebody wants a link between them.
    """
    if not hasattr(os, "memfd_create"):
        return None
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return boot, *(str(Path(f"/proc/self/ns/{space}").stat().st_ino) for space in ("net", "pid"))
    except OSError:
        return None


class SharedBuffers:
    """Buffers of the same sizes in each of some ranks of one machine, and their sums.

    Made by `allocate`. ``own`` are this rank's, zero at first; the memory for them is taken when they are made, and counts as this rank's.
    """

    def __init__(self, place: int, seen: Sequence[Sequence[Tensor]]) -> None:
        self.own = list(seen[place])
        self._place = place
        self._by_buffer = list(zip(*seen, strict=True))
        self._touched: dict[
            tuple[int, int, int], int
        ] = {}  # bytes of others, by buffer, whose (-1: in sums, of all), and where

    @classmethod
    def allocate(cls, sizes: Sequence[tuple[int, torch.dtype]], place: int, gather: Gather) -> SharedBuffers | None:
        """Buffers of ``(elements, dtype)`` on every rank, or None, on every rank alike, if one of them cannot.

        Collective. ``gather`` gives the values of all ranks, in order; ``place`` is this rank's among them.
        """
        offsets, total = _layout(sizes)
        made = make_memory(total)
        try:
            maps: list[mmap.mmap | None] = []
            for peer, path in enumerate(gather(None if made is None else f"/proc/{os.getpid()}/fd/{made[1]}")):
                own = made[0] if made is not None and peer == place else None
                maps.append(own or open_memory(path, total))
            everywhere = all(gather(None not in maps))
        finally:
            if made is not None:
                os.close(made[1])  # all that will ever open it have
        if not everywhere:
            return None
        return cls(place, [[_view(m, o, *size) for o, size in zip(offsets, sizes, strict=True)] for m in maps if m])

    def sum_of(self, tensor: Tensor, own: Range | None = None) -> Callable[[], None] | None:
        """What puts the sum over the ranks into this rank's slice of a flat tensor, one of the own buffers or consecutive elements of it;
        None for another tensor.

        ``own``: that slice, and only this rank gets it; None: every rank has one that is as long, and all get all sums. Every rank has
        filled its buffer before, and the sums are there when every rank has called it. Halves are added up in float32 and rounded once.
        """
        found = self._place_of(tensor)
        if found is None or self.own[found[0]].dtype != tensor.dtype:
            return None
        index, offset = found
        places = len(self._by_buffer[index])
        slice_ = _slice(tensor.numel(), self._place, places) if own is None else own
        first, last = (offset // tensor.element_size() + border for border in slice_)
        return partial(self._add_up, index, (first, last), everywhere=own is None)

    def copies_of(self, tensor: Tensor, ranges: Sequence[Range]) -> Callable[[], None] | None:
        """What copies the range of each rank from its buffer into this rank's; None if ``tensor`` is not in an own buffer.

        ``tensor`` may be a part of one, with another dtype.
        """
        found = self._place_of(tensor)
        if found is None:
            return None
        index, offset = found
        size = tensor.element_size()
        return partial(self._copy, index, [(offset + size * first, offset + size * last) for first, last in ranges])

    def _place_of(self, tensor: Tensor) -> tuple[int, int] | None:
        """Return the number of the own buffer that a flat tensor lies in, and at which byte of it; None for another tensor."""
        for index, own in enumerate(self.own):
            offset = tensor.data_ptr() - own.data_ptr()
            if tensor.nbytes and 0 <= offset <= own.nbytes - tensor.nbytes:
                return index, offset
        return None

    def _copy(self, index: int, in_bytes: Sequence[Range]) -> None:
        buffers = [buffer.view(torch.uint8) for buffer in self._by_buffer[index]]
        others = [(place, *of) for place, of in enumerate(in_bytes) if place != self._place]
        for place, first, last in others:
            buffers[self._place][first:last].copy_(buffers[place][first:last])
        self._touched |= {(index, place, first): last - first for place, first, last in others}

    def _add_up(self, index: int, own: Range, *, everywhere: bool) -> None:
        buffers = self._by_buffer[index]
        first, last = own
        parts = [buffer[first:last] for buffer in buffers]
        add_up(parts, parts if everywhere else [parts[self._place]])
        self._touched[index, -1, first] = (len(buffers) - 1) * (last - first) * buffers[0].element_size()

    def of_all(self, index: int) -> list[Tensor]:
        """A buffer as each rank has it."""
        return list(self._by_buffer[index])

    @property
    def borrowed_bytes(self) -> int:
        """Bytes of other ranks' buffers that are in this process's resident size, though they are not its own."""
        return sum(self._touched.values())


def add_up(parts: Sequence[Tensor], into: Sequence[Tensor]) -> None:
    """The sum of flat tensors, in their order, into each of others, which may be among them.

    Halves are added up in float32 and rounded once.
    """
    dtype = torch.float32 if parts[0].dtype in _LOW else parts[0].dtype
    step = max(1, _CHUNK_BYTES // parts[0].element_size())
    elements = parts[0].numel()
    room = torch.empty(min(step, elements), dtype=dtype)
    for start in range(0, elements, step):
        chunks = [part[start : start + step] for part in parts]
        total = room[: chunks[0].numel()]
        total.copy_(chunks[0])
        for chunk in chunks[1:]:
            total.add_(chunk)
        for each in into:
            each[start : start + step].copy_(total)


def _slice(elements: int, place: int, places: int) -> tuple[int, int]:
    return elements * place // places, elements * (place + 1) // places


def _layout(sizes: Sequence[tuple[int, torch.dtype]]) -> tuple[list[int], int]:
    """Where each buffer begins, and the bytes of all."""
    offsets, total = [], 0
    for elements, dtype in sizes:
        offsets.append(total)
        total += -(-elements * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT
    return offsets, total


def make_memory(size: int) -> tuple[mmap.mmap, int] | None:
    """New memory of that size, mapped, and its file descriptor; None if there is no room for it."""
    if not size:
        return None
    try:
        descriptor = os.memfd_create("heterodyne")
    except OSError:
        return None
    try:
        os.posix_fallocate(descriptor, 0, size)  # to lack memory now is an error, later it is a signal that kills
        return mmap.mmap(descriptor, size), descriptor
    except OSError:
        os.close(descriptor)
        return None


def open_memory(path: object, size: int) -> mmap.mmap | None:
    """Somebody else's memory, mapped; None where it cannot be."""
    if not isinstance(path, str):
        return None
    try:
        with Path(path).open("r+b") as file:
            return mmap.mmap(file.fileno(), size)
    except (OSError, ValueError):  # of another user, or hidden from this one
        return None


def _view(memory: mmap.mmap, offset: int, elements: int, dtype: torch.dtype) -> Tensor:
    if not elements:
        return torch.zeros(0, dtype=dtype)
    return torch.frombuffer(memory, dtype=dtype, count=elements, offset=offset)

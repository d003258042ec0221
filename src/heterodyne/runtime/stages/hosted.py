"""Activation offload: saved tensors of a run wait in host memory until its backward.

Saved tensors are replaced by handles. After the forward of the run their storages are copied to the host while the next blocks run, and
freed when the next offloaded run is done, or at OFFLOAD: so at most one run is on its way out. Until then nothing that a backward needs
can change, so the copy has the right values whenever it is made. The backward fetches in reverse order: while one run is used, the one
before is on its way back; or RELOAD fetches all of them ahead.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from heterodyne.runtime.stages.host_link import Batch, HostLink

__all__ = ["Hosted", "HostedStore"]

Which = tuple[int, int]
"""Stage and micro-batch."""

Run = Callable[[Mapping[str, Tensor]], dict[str, Tensor]]


class _Memory:
    """All of a storage: on the device, on the host, or on the way back (``arriving``, as that one of the batch). ``wanted``: its backward
    is near, so it stays on the device if it is still there.
    """

    __slots__ = ("__weakref__", "arriving", "device", "host", "number", "wanted")

    def __init__(self, device: Tensor) -> None:
        self.device: Tensor | None = device
        self.host: Tensor | None = None
        self.arriving: Batch | None = None
        self.number = 0
        self.wanted = False

    def take(self) -> Tensor:
        if self.device is None:
            assert self.arriving is not None
            self.arriving.wait()
            self.device = self.arriving.take(self.number)
            self.arriving = self.host = None
        return self.device


@dataclass(frozen=True, slots=True, eq=False)
class _Handle:
    """Of a saved tensor: where in which memory it lies."""

    memory: _Memory
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


class HostedStore:
    """What a rank has on its host, and on the way there."""

    def __init__(self, device: torch.device) -> None:
        self.link = HostLink(device)
        self._leaving: tuple[Batch, list[_Memory], Which] | None = None

    def send(self, memories: list[_Memory], which: Which) -> None:
        """Begin to copy them; those before are let go of. ``which``: what they are of."""
        batch = self.link.out([memory.device for memory in memories if memory.device is not None])
        for number, memory in enumerate(memories):
            memory.host = batch.take(number)
        self.settle()
        self._leaving = batch, memories, which

    def settle(self, which: Which | None = None) -> None:
        """What is on its way to the host is gone from the device, if it is of that; None: whatever it is of."""
        if self._leaving is not None and which in (None, self._leaving[-1]):
            batch, memories, _ = self._leaving
            batch.wait()
            for memory in memories:
                if not memory.wanted:
                    memory.device = None
            self._leaving = None


class Hosted:
    """One run of ``run`` on ``values``.

    Args:
        store: of this rank.
        which: the stage and the micro-batch that it is of.
        weights: addresses of memory that stays where it is, whoever saves it.
        before: the run ahead of this one; None: this one's backward is the last.
    """

    def __init__(
        self,
        run: Run,
        values: Mapping[str, Tensor],
        store: HostedStore,
        *,
        which: Which,
        weights: Collection[int],
        before: Hosted | None,
    ) -> None:
        self._run = run
        self._values = values
        self._store = store
        self._which = which
        self._weights = weights
        self._before = before
        self._memories: dict[int, weakref.ref[_Memory]] = {}
        self._asked = False
        self._used = False
        self._returning: Batch | None = None

    def first(self) -> dict[str, Tensor]:
        """The values that it makes, with their graph."""
        with torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack):
            made = self._run(self._values)
        self._values = {}
        self._store.send(self._alive(), self._which)
        return made

    def fetch(self) -> None:
        """Begin to bring back what is on the host, if that was not done yet."""
        if self._asked:
            return
        self._asked = True
        away = []
        for memory in self._alive():
            memory.wanted = True
            if memory.device is None:
                away.append(memory)
        self._returning = self._store.link.back([memory.host for memory in away if memory.host is not None])
        for number, memory in enumerate(away):
            memory.arriving, memory.number = self._returning, number

    def close(self) -> None:
        """Its backward is over. What nothing has asked for must have come before the memory that it comes into is used again."""
        if self._returning is not None:
            self._returning.wait()
            self._returning = None

    def _begin_use(self) -> None:
        """Its backward has come to it."""
        self._used = True
        self.fetch()
        if self._before is not None:
            self._before.fetch()
            self._before = None
        if self._returning is not None and self._returning.count == len(self._alive()):
            # The one behind it was still on its way out when its backward began, and has been used up meanwhile.
            self._store.settle(self._which)

    def _alive(self) -> list[_Memory]:
        return [memory for ref in self._memories.values() if (memory := ref()) is not None]

    def _pack(self, tensor: Tensor) -> Tensor | _Handle:
        storage = tensor.untyped_storage()
        address = storage.data_ptr()
        if address in self._weights or not storage.nbytes() or tensor.device.type != self._store.link.device.type:
            return tensor.detach()  # an output that its own op keeps would hold itself for ever
        known = self._memories.get(address)
        memory = None if known is None else known()
        if memory is None:
            whole = torch.empty(0, dtype=torch.uint8, device=tensor.device)
            memory = _Memory(whole.set_(storage, 0, (storage.nbytes(),), (1,)))
            self._memories[address] = weakref.ref(memory)
        return _Handle(memory, tensor.dtype, tensor.size(), tensor.stride(), int(tensor.storage_offset()))

    def _unpack(self, kept: Tensor | _Handle) -> Tensor:
        if isinstance(kept, Tensor):
            return kept
        if not self._used:
            self._begin_use()
        whole = kept.memory.take()
        made = torch.empty(0, dtype=kept.dtype, device=whole.device)
        return made.set_(whole.untyped_storage(), kept.offset, kept.size, kept.stride)

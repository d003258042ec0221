"""The other ranks, as a measurement needs them: the shape of the runtime's communicator, through which training will go too."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol, TypeVar

import torch

__all__ = ["P2P", "Peers", "ProcessGroup", "RecvWork", "Work"]

T = TypeVar("T")


class Work(Protocol):
    """A collective on its way."""

    def wait(self) -> object: ...


class ProcessGroup(Protocol):
    """Collectives among some ranks, in one order."""

    def buffers(self, sizes: Sequence[tuple[int, torch.dtype]]) -> list[torch.Tensor]:
        """Flat buffers of so many elements, zero at first, which `all_reduce` sums in the cheapest way."""
        ...

    def all_reduce(self, tensor: torch.Tensor) -> Work:
        """Start the sum of a tensor over the ranks, in place."""
        ...

    def all_to_all(self, parts: Sequence[torch.Tensor], sizes: Sequence[int]) -> Callable[[], list[torch.Tensor]]:
        """Begin to send the flat ``parts[j]`` to the j-th rank; what is returned waits for ``sizes[i]`` elements from the i-th."""
        ...

    def close(self) -> None:
        """Give its buffers back."""
        ...


class RecvWork(Protocol):
    """A message on its way to this rank."""

    def wait(self) -> torch.Tensor: ...


class P2P(Protocol):
    """Messages between two ranks, on their devices, in the order in which they are sent."""

    def connect(self, others: Iterable[int]) -> None:
        """Join this rank with others, as they do with it."""
        ...

    def send(self, tensor: torch.Tensor, to: int) -> None:
        """Start to send; the tensor stays as it is until `settle`."""
        ...

    def receive(self, shape: tuple[int, ...], dtype: torch.dtype, source: int) -> RecvWork: ...

    def settle(self) -> None:
        """Wait until all has left."""
        ...

    def close(self) -> None: ...


class Peers(Protocol):
    """Every rank makes the same calls in the same order; with one rank every call is the identity."""

    @property
    def rank(self) -> int: ...

    @property
    def world_size(self) -> int: ...

    def barrier(self) -> None: ...

    def all_gather_object(self, value: T) -> list[T]:
        """The picklable value of every rank, on every rank, in order of rank."""
        ...

    def broadcast_object(self, value: T, source: int) -> T:
        """The picklable value of one rank."""
        ...

    def process_group(self, ranks: Sequence[int]) -> ProcessGroup | None: ...

    def p2p(self) -> P2P:
        """Return how training sends tensors from rank to rank. Collective."""
        ...

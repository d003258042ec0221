"""The other ranks, as a measurement needs them: few calls, and one process alone is a group too."""

from __future__ import annotations

from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist

from heterodyne.errors import MeasureError

__all__ = ["Alone", "Finished", "GroupPeers", "Peers", "Pending"]

T = TypeVar("T")


class Pending(Protocol):
    """A collective on its way."""

    def wait(self) -> object: ...

    def is_completed(self) -> bool: ...


class Peers(Protocol):
    """Every rank makes the same calls in the same order. Objects are pickled; tensors are reduced in place, by sum."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def barrier(self) -> None: ...

    def gather(self, value: T) -> list[T]:
        """The value of every rank, on every rank, in order of rank."""
        ...

    def broadcast(self, value: T) -> T:
        """The value of rank 0."""
        ...

    def start_all_reduce(self, tensor: torch.Tensor) -> Pending:
        """Begin the sum of a tensor over all ranks."""
        ...

    def send(self, tensor: torch.Tensor, destination: int) -> None: ...

    def receive(self, tensor: torch.Tensor, source: int) -> None: ...


class Finished:
    """A collective that had nothing to do."""

    def wait(self) -> None:
        return

    def is_completed(self) -> bool:
        return True


class Alone:
    """One process: nothing to wait for, and the sum of one tensor is that tensor."""

    rank = 0
    size = 1

    def barrier(self) -> None:
        return

    def gather(self, value: T) -> list[T]:
        return [value]

    def broadcast(self, value: T) -> T:
        return value

    def start_all_reduce(self, tensor: torch.Tensor) -> Pending:  # noqa: ARG002  # the sum of one is itself
        return Finished()

    def send(self, tensor: torch.Tensor, destination: int) -> None:
        raise MeasureError(f"one process cannot send {tensor.numel()} elements to rank {destination}")

    def receive(self, tensor: torch.Tensor, source: int) -> None:
        raise MeasureError(f"one process cannot receive {tensor.numel()} elements from rank {source}")


class GroupPeers:
    """The ranks of a process group of torch.distributed; None: the default group."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self._group = group

    @property
    def rank(self) -> int:
        return dist.get_rank(self._group)

    @property
    def size(self) -> int:
        return dist.get_world_size(self._group)

    def barrier(self) -> None:
        dist.barrier(self._group)

    def gather(self, value: T) -> list[T]:
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self._group)
        return values

    def broadcast(self, value: T) -> T:
        holder: list[Any] = [value]
        dist.broadcast_object_list(holder, group=self._group, group_src=0)
        received: T = holder[0]
        return received

    def start_all_reduce(self, tensor: torch.Tensor) -> Pending:
        work: Pending = dist.all_reduce(tensor, group=self._group, async_op=True)
        return work

    def send(self, tensor: torch.Tensor, destination: int) -> None:
        dist.send(tensor, group=self._group, group_dst=destination)

    def receive(self, tensor: torch.Tensor, source: int) -> None:
        dist.recv(tensor, group=self._group, group_src=source)

"""Collectives between the devices of a sharded stage, with unequal shards.

Shards may have any sizes, also 0. Members joined by the native backend of an accelerator use its collectives. Elsewhere each is an
all-to-all, and sums are taken in the order of the members. All members get the same bits. Autograd does not see these: differentiable
ops are built of them in `conversions` and beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import prod
from typing import TypeAlias

import torch
from torch import Tensor

from heterodyne.graph.sharding.layout import reduced_at_once
from heterodyne.runtime.comm.process_group import ProcessGroup

__all__ = ["Group", "Hosts", "Later"]

Later: TypeAlias = Callable[[], Tensor]
"""Waits for what has begun, and gives what came of it."""


class Group:
    """The members of a sharded stage, in the order of its devices.

    Args:
        process_group: joins them; None: this device is alone, and every collective is the identity.
        position: the index of this member.
        size: the number of members.
        places: of each member its index in the process group, which goes by ranks; None: the same order.
        hosts: where the members are, if all-to-alls that can be hierarchical shall be so.

    All calls are collective, in the same order on every member, and block until the result is there; those that begin with ``begin_``
    are asynchronous and return a function that waits.
    """

    def __init__(
        self,
        process_group: ProcessGroup | None,
        position: int,
        size: int,
        places: Sequence[int] | None = None,
        hosts: Hosts | None = None,
    ) -> None:
        self._process_group = process_group
        self.position = position
        self.size = size
        self.hosts = hosts
        own = list(range(size) if places is None else places)
        self._members = sorted(range(size), key=own.__getitem__)  # in the order of the process group

    def all_to_all(self, parts: Sequence[Tensor], shapes: Sequence[Sequence[int]]) -> list[Tensor]:
        """Send ``parts[j]`` to member j; get from each member i what it has sent here, of shape ``shapes[i]``, of the same dtype."""
        return self.begin_all_to_all(parts, shapes)()

    def all_gather(self, part: Tensor, dim: int, sizes: Sequence[int]) -> Tensor:
        """The parts of all members, side by side along ``dim``; ``sizes``: of each of them in that dim."""
        return self.begin_all_gather(part, dim, sizes)()

    def all_gather_uneven(self, part: Tensor, shapes: Sequence[Sequence[int]]) -> list[Tensor]:
        """The tensors of all members, of any shapes, one dtype."""
        return self._begin_gather(part, shapes)()

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """The sum of everyone's tensor, the same bits on every member; a new tensor."""
        return self.begin_all_reduce(tensor)()

    def begin_all_to_all(self, parts: Sequence[Tensor], shapes: Sequence[Sequence[int]]) -> Callable[[], list[Tensor]]:
        """Begin `all_to_all`. What is returned waits for it; until then the parts must stay as they are."""
        own = parts[self.position]
        if self._process_group is None or self.size == 1:
            return lambda: [own]
        arriving = self._process_group.all_to_all(
            [parts[member].reshape(-1) for member in self._members], [prod(shapes[member]) for member in self._members]
        )

        def arrived() -> list[Tensor]:
            flat = dict(zip(self._members, arriving(), strict=True))
            return [flat[member].view(tuple(shape)) for member, shape in enumerate(shapes)]

        return arrived

    def begin_all_gather(self, part: Tensor, dim: int, sizes: Sequence[int]) -> Later:
        """Begin `all_gather`."""
        if self.size == 1:
            return lambda: part
        shapes = [(*part.shape[:dim], size, *part.shape[dim + 1 :]) for size in sizes]
        arriving = self._begin_gather(part, shapes)
        return lambda: torch.cat(arriving(), dim)

    def begin_reduce_scatter(self, whole: Tensor, dim: int, sizes: Sequence[int]) -> Later:
        """Start a reduce-scatter: this member's shard of the sum of everyone's ``whole``, which is sharded along ``dim`` into ``sizes``."""
        if self.size == 1:
            return lambda: whole
        parts = whole.split_with_sizes(list(sizes), dim)
        if self._process_group is not None and self._process_group.native:
            summing = self._process_group.reduce_scatter([parts[member].reshape(-1) for member in self._members])
            return lambda: summing().view(parts[self.position].shape)
        arriving = self.begin_all_to_all(parts, [parts[self.position].shape] * self.size)
        return lambda: self._added_up(arriving())

    def begin_all_reduce(self, tensor: Tensor) -> Later:
        """Begin `all_reduce`. On the host only the first of two exchanges of a large tensor begins here; the second is part of waiting."""
        if self.size == 1:
            return tensor.clone
        if self._process_group is not None and self._process_group.native:
            total = tensor.clone(memory_format=torch.contiguous_format)
            pending = self._process_group.all_reduce(total)

            def reduced() -> Tensor:
                pending.wait()
                return total

            return reduced
        if reduced_at_once(tensor.numel() * tensor.element_size(), self.size):
            arriving = self.begin_all_to_all([tensor] * self.size, [tensor.shape] * self.size)
            return lambda: self._added_up(arriving())
        bounds = [tensor.numel() * i // self.size for i in range(self.size + 1)]
        sizes = [high - low for low, high in pairwise(bounds)]
        own_sum = self.begin_reduce_scatter(tensor.reshape(-1), 0, sizes)
        return lambda: self.all_gather(own_sum(), 0, sizes).view(tensor.shape)

    def _begin_gather(self, part: Tensor, shapes: Sequence[Sequence[int]]) -> Callable[[], list[Tensor]]:
        if self._process_group is None or self.size == 1 or not self._process_group.native:
            return self.begin_all_to_all([part] * self.size, shapes)
        arriving = self._process_group.all_gather(part.reshape(-1), [prod(shapes[member]) for member in self._members])

        def arrived() -> list[Tensor]:
            flat = dict(zip(self._members, arriving(), strict=True))
            return [flat[member].view(tuple(shape)) for member, shape in enumerate(shapes)]

        return arrived

    def bounds(self, sizes: Sequence[int]) -> tuple[int, int]:
        """``(first, stop)`` of this member's shard of a dim that is sharded into ``sizes``."""
        borders = list(accumulate(sizes, initial=0))
        return borders[self.position], borders[self.position + 1]

    def _added_up(self, parts: Sequence[Tensor]) -> Tensor:
        total = parts[0].clone()
        for part in parts[1:]:
            total += part
        return total


@dataclass(frozen=True)
class Hosts:
    """The hosts of the members of a group.

    Args:
        of_members: the number of each one's host, from 0 on.
        inside: the members of this one's host, in their order.
    """

    of_members: tuple[int, ...]
    inside: Group

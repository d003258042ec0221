"""Collectives between the devices of a stage, over parts that need not be alike.

Every one of them is an exchange in which each member sends each other member what that one needs, so parts may be of any sizes,
also empty. Sums are taken in the order of the members, so all get the same bits. None of this is seen by autograd: what has a
gradient is built of these in `conversions` and beside it.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Final

import torch
from torch import Tensor

from heterodyne.runtime.meeting.communicator import Channel

__all__ = ["Group"]

_SMALL_BYTES: Final = 2**16
"""Up to this size a tensor is sent whole to everyone and added up there: one exchange in place of two."""


class Group:
    """The members of a stage, in the order of its devices.

    Args:
        channel: joins them; None: this device is alone, and every collective is the identity.
        position: of this one.
        size: how many there are.

    All calls are collective, in the same order on every member, and block until the result is there.
    """

    def __init__(self, channel: Channel | None, position: int, size: int) -> None:
        self._channel = channel
        self.position = position
        self.size = size

    def all_to_all(self, parts: Sequence[Tensor], shapes: Sequence[Sequence[int]]) -> list[Tensor]:
        """Send ``parts[j]`` to member j; get from each member i what it has sent here, of shape ``shapes[i]``, of the same dtype."""
        own = parts[self.position]
        if self._channel is None or self.size == 1:
            return [own]
        received = self._channel.all_to_all([part.reshape(-1) for part in parts], [_numel(shape) for shape in shapes])
        return [flat.view(tuple(shape)) for flat, shape in zip(received, shapes, strict=True)]

    def all_gather(self, part: Tensor, dim: int, sizes: Sequence[int]) -> Tensor:
        """The parts of all members, side by side along ``dim``; ``sizes``: of each of them in that dim."""
        if self.size == 1:
            return part
        shapes = [(*part.shape[:dim], size, *part.shape[dim + 1 :]) for size in sizes]
        return torch.cat(self.all_to_all([part] * self.size, shapes), dim)

    def all_gather_uneven(self, part: Tensor, shapes: Sequence[Sequence[int]]) -> list[Tensor]:
        """The tensors of all members, of any shapes, one dtype."""
        return self.all_to_all([part] * self.size, shapes)

    def reduce_scatter(self, whole: Tensor, dim: int, sizes: Sequence[int]) -> Tensor:
        """This member's part of the sum of everyone's ``whole``, which is cut along ``dim`` into ``sizes``."""
        if self.size == 1:
            return whole
        parts = whole.split_with_sizes(list(sizes), dim)
        return self._added_up(self.all_to_all(parts, [parts[self.position].shape] * self.size))

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """The sum of everyone's tensor, the same bits on every member; a new tensor."""
        if self.size == 1:
            return tensor.clone()
        if self.size == 2 or tensor.numel() * tensor.element_size() <= _SMALL_BYTES:
            return self._added_up(self.all_to_all([tensor] * self.size, [tensor.shape] * self.size))
        flat = tensor.reshape(-1)
        bounds = [tensor.numel() * i // self.size for i in range(self.size + 1)]
        sizes = [high - low for low, high in pairwise(bounds)]
        return self.all_gather(self.reduce_scatter(flat, 0, sizes), 0, sizes).view(tensor.shape)

    def maximum(self, tensor: Tensor) -> Tensor:
        """The largest of everyone's elements, place by place; a new tensor."""
        result = tensor.clone()
        for other in self.all_to_all([tensor] * self.size, [tensor.shape] * self.size):
            result = torch.maximum(result, other)
        return result

    def bounds(self, sizes: Sequence[int]) -> tuple[int, int]:
        """``(first, stop)`` of this member's part of a dim that is cut into ``sizes``."""
        borders = list(accumulate(sizes, initial=0))
        return borders[self.position], borders[self.position + 1]

    def _added_up(self, parts: Sequence[Tensor]) -> Tensor:
        total = parts[0].clone()
        for part in parts[1:]:
            total += part
        return total


def _numel(shape: Sequence[int]) -> int:
    product = 1
    for size in shape:
        product *= size
    return product

"""Redistribution of a tensor over the devices of a sharded stage, forward and backward.

`heterodyne.graph.sharding.layout` says which collective each conversion is. Each is an autograd node on every member, also on one with
an empty shard, so all members reach the collectives of the backward in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor

from heterodyne.graph.sharding.layout import Layout
from heterodyne.runtime.split.group import Group, Later

__all__ = ["Redistribution", "Step", "converted", "ways_between"]

Step: TypeAlias = Callable[[Tensor], Later]
"""Begins to bring a tensor to other members, or to lay it out otherwise, and returns what waits for the result."""


def converted(
    group: Group, tensor: Tensor, have: Layout, want: Layout, have_sizes: Sequence[int], want_sizes: Sequence[int]
) -> Tensor:
    """The tensor of layout ``have``, redistributed to ``want``. Collective.

    ``have_sizes``, ``want_sizes``: sizes of the members' shards, where that layout is sharded.
    """
    if have == want or group.size == 1:
        return tensor
    way = Redistribution(*ways_between(group, have, want, have_sizes, want_sizes))
    return way.end(way.begin(tensor))


class Redistribution:
    """An asynchronous redistribution: the tensor in the forward and its gradient in the backward, each started and waited for by separate
    calls.

    In the backward, whatever follows `end` in the forward runs before the gradient's collective starts, and whatever stands between
    `begin` and `end` overlaps with it. The tensor must not be changed before `end`.

    Args:
        there, back: start the collective of the tensor and of its gradient.
    """

    def __init__(self, there: Step, back: Step) -> None:
        self._there, self._back = there, back
        self._later: Later | None = None

    def begin(self, tensor: Tensor, also: Tensor | None = None) -> Tensor:
        """Starts the collective; returns a placeholder. ``also``: if that requires grad, so does the tensor."""
        if not torch.is_grad_enabled() or not (tensor.requires_grad or (also is not None and also.requires_grad)):
            self.leave(tensor)
            return tensor.new_empty(0)
        begun: Tensor = _Begun.apply(tensor, also, self)  # type: ignore[no-untyped-call]
        return begun

    def end(self, begun: Tensor) -> Tensor:
        """The redistributed tensor."""
        if not begun.requires_grad:
            return self.arrive()
        ended: Tensor = _Ended.apply(begun, self)  # type: ignore[no-untyped-call]
        return ended

    def leave(self, tensor: Tensor) -> None:
        """Start the collective of the tensor."""
        self._later = self._there(tensor)

    def leave_for_home(self, gradient: Tensor) -> None:
        """Start the collective of the gradient."""
        self._later = self._back(gradient)

    def arrive(self) -> Tensor:
        """Wait for the collective that was started."""
        later, self._later = self._later, None
        assert later is not None, "what ends has begun before"
        return later()


def ways_between(
    group: Group, have: Layout, want: Layout, have_sizes: Sequence[int], want_sizes: Sequence[int]
) -> tuple[Step, Step]:
    """The collective from one layout to another, and that of the gradient, which has the dual layouts."""
    return (
        _STEPS[have.kind, want.kind](group, have.dim, want.dim, have_sizes, want_sizes),
        _STEPS[_DUAL[want.kind], _DUAL[have.kind]](group, want.dim, have.dim, want_sizes, have_sizes),
    )


_DUAL = {"replicate": "replicate", "copy": "partial", "partial": "replicate", "shard": "shard"}
"""How the gradient of a layout lies. That of a sum is the same on each member; that of a whole is too."""


class _Begun(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, also: Tensor | None, travel: Redistribution) -> Tensor:  # noqa: ARG004
        ctx.travel = travel
        travel.leave(tensor)
        return tensor.new_empty(0)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor, None, None]:
        return ctx.travel.arrive(), None, None


class _Ended(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, begun: Tensor, travel: Redistribution) -> Tensor:
        ctx.travel, ctx.like = travel, begun.new_empty(0)
        result = travel.arrive()
        return result.view_as(result)  # it may be what was sent

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        ctx.travel.leave_for_home(gradients[0])
        return ctx.like, None


def _identity(group: Group, dim: int, other: int, sizes: Sequence[int], others: Sequence[int]) -> Step:
    del group, dim, other, sizes, others
    return lambda tensor: lambda: tensor


def _reduced(group: Group, dim: int, other: int, sizes: Sequence[int], others: Sequence[int]) -> Step:
    del dim, other, sizes, others
    return group.begin_all_reduce


def _kept_by_the_first(group: Group, dim: int, other: int, sizes: Sequence[int], others: Sequence[int]) -> Step:
    del dim, other, sizes, others
    return lambda tensor: lambda: tensor if group.position == 0 else torch.zeros_like(tensor)


def _gathered(group: Group, dim: int, other: int, sizes: Sequence[int], others: Sequence[int]) -> Step:
    del other, others
    return lambda tensor: group.begin_all_gather(tensor, dim, sizes)


def _scattered(group: Group, dim: int, other: int, sizes: Sequence[int], others: Sequence[int]) -> Step:
    del dim, sizes
    return lambda tensor: group.begin_reduce_scatter(tensor, other, others)


def _sliced(group: Group, dim: int, other: int, sizes: Sequence[int], others: Sequence[int]) -> Step:
    del dim, sizes
    first, stop = group.bounds(others)
    # A slice of its own: a view would keep the whole tensor.
    return lambda tensor: tensor.narrow(other, first, stop - first).clone


def _among_zeros(group: Group, dim: int, other: int, sizes: Sequence[int], others: Sequence[int]) -> Step:
    del other, others
    first, stop = group.bounds(sizes)

    def place(tensor: Tensor) -> Tensor:
        shape = list(tensor.shape)
        shape[dim] = sum(sizes)
        result = tensor.new_zeros(shape)
        result.narrow(dim, first, stop - first).copy_(tensor)
        return result

    return lambda tensor: partial(place, tensor)


def _turned(group: Group, dim: int, other: int, sizes: Sequence[int], others: Sequence[int]) -> Step:
    """From slices of one dim to slices of another, or to other slices of the same."""
    if dim == other:
        return _moved(group, dim, sizes, others)

    def exchange(tensor: Tensor) -> Later:
        shape = list(tensor.shape)
        shape[other] = others[group.position]
        shapes = [[*shape[:dim], size, *shape[dim + 1 :]] for size in sizes]
        arriving = group.begin_all_to_all(list(tensor.split_with_sizes(list(others), other)), shapes)
        return lambda: torch.cat(arriving(), dim)

    return exchange


def _moved(group: Group, dim: int, sizes: Sequence[int], others: Sequence[int]) -> Step:
    """What each member has and another one wants of a dim: the overlaps of two cuts of it."""

    def overlaps(a: tuple[int, int], cuts: Sequence[int]) -> list[tuple[int, int]]:
        found, first = [], 0
        for size in cuts:
            low, high = max(a[0], first), min(a[1], first + size)
            found.append((low, max(0, high - low)))
            first += size
        return found

    own, wanted = group.bounds(sizes), group.bounds(others)

    def exchange(tensor: Tensor) -> Later:
        parts = [
            tensor.narrow(dim, min(max(low - own[0], 0), tensor.shape[dim]), count)
            for low, count in overlaps(own, others)
        ]
        shapes = [[*tensor.shape[:dim], count, *tensor.shape[dim + 1 :]] for _, count in overlaps(wanted, sizes)]
        arriving = group.begin_all_to_all(parts, shapes)
        return lambda: torch.cat(arriving(), dim)

    return exchange


_STEPS: dict[tuple[str, str], Callable[[Group, int, int, Sequence[int], Sequence[int]], Step]] = {
    ("replicate", "replicate"): _identity,
    ("replicate", "copy"): _identity,
    ("copy", "replicate"): _identity,
    ("replicate", "partial"): _kept_by_the_first,
    ("copy", "partial"): _kept_by_the_first,
    ("replicate", "shard"): _sliced,
    ("copy", "shard"): _sliced,
    ("partial", "partial"): _identity,
    ("partial", "replicate"): _reduced,
    ("partial", "copy"): _reduced,
    ("partial", "shard"): _scattered,
    ("shard", "replicate"): _gathered,
    ("shard", "copy"): _gathered,
    ("shard", "partial"): _among_zeros,
    ("shard", "shard"): _turned,
}

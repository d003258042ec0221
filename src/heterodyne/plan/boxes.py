"""Boxes: the parts of a tensor that devices hold, and the parts that the same devices hold.

A box names the dims that it does not span, each with a slice; () is the whole tensor. Where one pipeline cuts a weight by rows and
another one by columns, or into other widths, their boxes overlap: what has to be summed over the same devices are the boxes between
all the cuts together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise, product
from math import prod
from typing import NamedTuple, TypeAlias, TypeVar

__all__ = ["Box", "Slice", "covers", "inside", "numel", "refined"]


class Slice(NamedTuple):
    """``[first, stop)`` of a dim."""

    dim: int
    first: int
    stop: int


Box: TypeAlias = tuple[Slice, ...]
Holder = TypeVar("Holder")


def numel(box: Box, shape: Sequence[int]) -> int:
    """Elements of a box of a tensor of that shape."""
    sizes = list(shape)
    for cut in box:
        sizes[cut.dim] = cut.stop - cut.first
    return prod(sizes)


def covers(outer: Box, inner: Box, shape: Sequence[int]) -> bool:
    """Return whether all of ``inner`` is in ``outer``."""
    within = {cut.dim: cut for cut in inner}
    for cut in outer:
        first, stop = (within[cut.dim].first, within[cut.dim].stop) if cut.dim in within else (0, shape[cut.dim])
        if first < cut.first or stop > cut.stop:
            return False
    return True


def inside(outer: Box, inner: Box) -> Box:
    """``inner``, which is in ``outer``, counted from where that begins; without the dims that it spans there."""
    begins = {cut.dim: cut for cut in outer}
    found = []
    for cut in inner:
        of = begins.get(cut.dim)
        if of is None:
            found.append(cut)
        elif (cut.first, cut.stop) != (of.first, of.stop):
            found.append(Slice(cut.dim, cut.first - of.first, cut.stop - of.first))
    return tuple(found)


def refined(holders: Mapping[Holder, Box], shape: Sequence[int]) -> list[tuple[Box, tuple[Holder, ...]]]:
    """The boxes between all cuts that the holders' boxes make, each with those who hold it. Nothing of a box without elements."""
    borders: dict[int, set[int]] = {}
    for box in holders.values():
        for cut in box:
            borders.setdefault(cut.dim, {0, shape[cut.dim]}).update((cut.first, cut.stop))
    dims = sorted(borders)
    found: list[tuple[Box, tuple[Holder, ...]]] = []
    for corner in product(*(pairwise(sorted(borders[dim])) for dim in dims)):
        box = tuple(Slice(dim, first, stop) for dim, (first, stop) in zip(dims, corner, strict=True))
        of = tuple(holder for holder, held in holders.items() if covers(held, box, shape))
        if of:
            found.append((box, of))
    return found

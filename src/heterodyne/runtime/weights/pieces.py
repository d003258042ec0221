"""Tensors in pieces: what several ranks hold of one tensor, and the tensor that the pieces make."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
from torch import Tensor

from heterodyne.plan.boxes import Box, inside
from heterodyne.plan.state_shards import Range
from heterodyne.runtime.weights.boxed import boxed
from heterodyne.runtime.weights.ownership import Ownership

__all__ = ["Piece", "Pieces", "Place", "as_tensor", "box_pieces", "joined", "joined_by_name", "part_of", "range_pieces"]


@dataclass(frozen=True, slots=True)
class Place:
    """The elements ``range`` of a ``box`` of a tensor, row after row; None: all elements of the box."""

    box: Box
    range: Range | None


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    place: Place
    tensor: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Pieces:
    """Pieces of a tensor of that shape. A state has it in the place of the tensor: those that one rank holds where it is written, all of
    them where it is read. Then nothing is copied, or read from a file, until a part of it is asked for.

    ``box``: the part of the tensor that is meant.
    """

    whole: tuple[int, ...]
    of: tuple[Piece, ...]
    box: Box = ()

    @property
    def shape(self) -> tuple[int, ...]:
        """Of what is meant."""
        sizes = list(self.whole)
        for cut in self.box:
            sizes[cut.dim] = cut.stop - cut.first
        return tuple(sizes)

    def within(self, box: Box) -> Pieces:
        """Return the same pieces, of which that box is meant."""
        return replace(self, box=box)

    def part(self, range: Range | None = None) -> Tensor:
        """Return what is meant, or a range of its elements, flat. Raises ValueError if elements of it are missing."""
        own = [piece for piece in self.of if piece.place.box == self.box]
        if sum(piece.tensor.numel() for piece in own) == prod(self.shape):
            found = _range_of(own, range or (0, prod(self.shape)))
            return found.view(self.shape) if range is None else found
        found = boxed(joined(self.whole, self.of), self.box)
        # A copy, so that no part of it keeps all of it.
        return found.reshape(-1)[slice(*range)].clone() if range is not None else found.clone() if self.box else found


def as_tensor(value: Any) -> Any:
    """Return the tensor that pieces make; anything else as it is."""
    return value.part() if isinstance(value, Pieces) else value


def part_of(value: Tensor | Pieces, box: Box) -> Tensor:
    """Return a box of a tensor, or of one in pieces."""
    return value.within(box).part() if isinstance(value, Pieces) else boxed(value, box)


def range_pieces(name: str, held: Tensor, ownership: Ownership, rank: int) -> Pieces | None:
    """Return what a rank holds of a parameter whose elements are sharded, or of what lies as it does. Nothing is copied."""
    return _pieces(
        ownership.shapes[name],
        (
            Piece(Place(box, ranges[rank]), held.detach().reshape(-1))
            for box, ranges in ownership.shards[name].items()
            if rank in ranges
        ),
    )


def box_pieces(name: str, held: Tensor, ownership: Ownership, rank: int) -> Pieces | None:
    """Return the boxes of a parameter, or of what lies as it does, for which the values of this rank count. Nothing is copied."""
    own = ownership.box(rank, name)
    return _pieces(
        ownership.shapes[name],
        (
            Piece(Place(box, None), boxed(held.detach(), inside(own, box)))
            for box, of in ownership.parts(name)
            if of == rank
        ),
    )


def joined(shape: tuple[int, ...], pieces: Iterable[Piece]) -> Tensor:
    """Return the whole tensor, on the host. Raises ValueError if elements of it are missing."""
    whole: Tensor | None = None
    missing = 0
    for piece in pieces:
        if whole is None:
            whole = torch.empty(shape, dtype=piece.tensor.dtype)
            missing = whole.numel()
        into = boxed(whole, piece.place.box)
        if piece.place.range is None:
            into.copy_(piece.tensor.view(into.shape))
        else:
            flat = into.contiguous().view(-1)
            flat[slice(*piece.place.range)] = piece.tensor.reshape(-1).to("cpu")
            into.copy_(flat.view(into.shape))
        missing -= piece.tensor.numel()
    if whole is None or missing:
        raise ValueError("parts of it are missing")
    return whole


def _range_of(pieces: Sequence[Piece], wanted: Range) -> Tensor:
    """Return a range of the elements of the box that these pieces make; other elements are not read."""
    found = torch.empty(wanted[1] - wanted[0], dtype=pieces[0].tensor.dtype)
    for piece in pieces:
        start, stop = piece.place.range or (0, piece.tensor.numel())
        first, last = max(start, wanted[0]), min(stop, wanted[1])
        if first < last:
            found[first - wanted[0] : last - wanted[0]] = piece.tensor.reshape(-1)[first - start : last - start]
    return found


def joined_by_name(gathered: Iterable[Mapping[str, Pieces]]) -> dict[str, Tensor]:
    """Return the tensors that the pieces of all ranks make, by name. Raises ValueError as `joined`."""
    of_all: dict[str, list[Pieces]] = {}
    for own in gathered:
        for name, pieces in own.items():
            of_all.setdefault(name, []).append(pieces)
    return {name: joined(found[0].whole, (p for each in found for p in each.of)) for name, found in of_all.items()}


def _pieces(shape: tuple[int, ...], found: Iterable[Piece]) -> Pieces | None:
    of = tuple(found)
    return Pieces(tuple(shape), of) if of else None

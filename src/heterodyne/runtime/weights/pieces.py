"""Tensors in pieces: what several ranks hold of one tensor, and the tensor that the pieces make."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from heterodyne.plan.boxes import Box, inside
from heterodyne.plan.state_shards import Range
from heterodyne.runtime.weights.boxed import boxed
from heterodyne.runtime.weights.ownership import Ownership

__all__ = ["Piece", "Pieces", "Place", "box_pieces", "joined", "joined_by_name", "range_pieces"]


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
    """The pieces that one rank holds of a tensor of that shape. A state may have it in the place of the tensor."""

    shape: tuple[int, ...]
    of: tuple[Piece, ...]


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


def joined_by_name(gathered: Iterable[Mapping[str, Pieces]]) -> dict[str, Tensor]:
    """Return the tensors that the pieces of all ranks make, by name. Raises ValueError as `joined`."""
    of_all: dict[str, list[Pieces]] = {}
    for own in gathered:
        for name, pieces in own.items():
            of_all.setdefault(name, []).append(pieces)
    return {name: joined(found[0].shape, (p for each in found for p in each.of)) for name, found in of_all.items()}


def _pieces(shape: tuple[int, ...], found: Iterable[Piece]) -> Pieces | None:
    of = tuple(found)
    return Pieces(tuple(shape), of) if of else None

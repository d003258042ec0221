"""What one rank holds of the state of all, told without asking anybody: the other ranks may not answer any more.

Of a tensor that is sharded each rank tells its own pieces, and where they belong; `joined` makes the tensor of the pieces of all.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from heterodyne.plan.boxes import Box, inside
from heterodyne.plan.state_shards import Range
from heterodyne.runtime.weights.boxed import boxed
from heterodyne.runtime.weights.materialise import stored_tensors
from heterodyne.runtime.weights.ownership import Ownership

__all__ = ["Held", "Piece", "held_state", "joined"]


@dataclass(frozen=True, kw_only=True, eq=False)
class Piece:
    """Of the tensor of that ``shape`` to which ``keys`` lead in the state: the elements ``range`` of the ``box``, row after row; None: all
    of them.
    """

    keys: tuple[str, ...]
    shape: tuple[int, ...]
    box: Box
    range: Range | None
    tensor: Tensor


@dataclass(frozen=True, kw_only=True, eq=False)
class Held:
    """``state``: what this rank alone answers for, as in a `state_dict`; ``pieces``: its parts of what lies on several."""

    state: dict[str, Any]
    pieces: tuple[Piece, ...]


def held_state(
    module: nn.Module,
    optimizer: Mapping[str, Mapping[str, Any]],
    ownership: Ownership,
    rank: int,
    *,
    shards: Mapping[str, Tensor],
    before: Mapping[str, Tensor],
) -> Held:
    """Nothing is copied. ``optimizer``: the state of what this rank updates, by name; ``shards``: what it holds of parameters that are
    sharded; ``before``: buffers that the step under way may have changed, as they were.
    """
    names = {id(tensor): name for name, tensor in stored_tensors(module)}
    model: dict[str, Any] = {}
    pieces: list[Piece] = []
    for entry, kept in module.state_dict(keep_vars=True).items():
        name = names.get(id(kept))
        if name is None:
            if rank == ownership.active[0]:
                model[entry] = kept
        elif ownership.apart and name in ownership.shards:
            pieces += _of_ranges(("model", entry), name, shards[name], ownership, rank) if name in shards else []
        elif name in ownership.boxes:
            pieces += _of_boxes(("model", entry), name, before.get(name, kept), ownership, rank)
        elif ownership.keeper(name) == rank:
            model[entry] = before.get(name, kept).detach()
    of_optimizer: dict[str, dict[str, Any]] = {}
    for name, values in optimizer.items():
        for key, value in values.items():
            parts = _parts_of_state(name, key, value, ownership, rank)
            if parts is not None:
                pieces += parts
            elif _teller(name, ownership) == rank:
                of_optimizer.setdefault(name, {})[key] = value
    return Held(state={"model": model, "optimizer": of_optimizer}, pieces=tuple(pieces))


def _parts_of_state(name: str, key: str, value: Any, ownership: Ownership, rank: int) -> list[Piece] | None:
    """The pieces of an entry that lies as its parameter does; None for any other, which one rank tells whole."""
    if not isinstance(value, Tensor) or value.dim() != len(ownership.shapes[name]):
        return None
    keys = ("optimizer", name, key)
    if name in ownership.shards:
        start, stop = ownership.updated(rank, name) or (0, 0)
        return _of_ranges(keys, name, value, ownership, rank) if value.numel() == stop - start else None
    return _of_boxes(keys, name, value, ownership, rank) if name in ownership.boxes else None


def _teller(name: str, ownership: Ownership) -> int:
    if name in ownership.shards:
        return next(iter(next(iter(ownership.shards[name].values()))))
    return ownership.parts(name)[0][1] if name in ownership.boxes else ownership.keeper(name)


def _of_ranges(keys: tuple[str, ...], name: str, held: Tensor, ownership: Ownership, rank: int) -> list[Piece]:
    return [
        Piece(keys=keys, shape=ownership.shapes[name], box=box, range=ranges[rank], tensor=held.detach().reshape(-1))
        for box, ranges in ownership.shards[name].items()
        if rank in ranges
    ]


def _of_boxes(keys: tuple[str, ...], name: str, held: Tensor, ownership: Ownership, rank: int) -> list[Piece]:
    own = ownership.box(rank, name)
    return [
        Piece(
            keys=keys,
            shape=ownership.shapes[name],
            box=box,
            range=None,
            tensor=boxed(held.detach(), inside(own, box)),
        )
        for box, of in ownership.parts(name)
        if of == rank
    ]


def joined(pieces: Iterable[Piece]) -> dict[tuple[str, ...], Tensor]:
    """The whole tensors, on the host, by the keys that lead to them. Raises ValueError for one of which elements are missing."""
    whole: dict[tuple[str, ...], Tensor] = {}
    missing: dict[tuple[str, ...], int] = {}
    for piece in pieces:
        into = whole.setdefault(piece.keys, torch.empty(piece.shape, dtype=piece.tensor.dtype))
        place = boxed(into, piece.box)
        if piece.range is None:
            place.copy_(piece.tensor.view(place.shape))
        else:
            flat = place.contiguous().view(-1)
            flat[slice(*piece.range)] = piece.tensor.view(-1)
            place.copy_(flat.view(place.shape))
        missing[piece.keys] = missing.get(piece.keys, into.numel()) - piece.tensor.numel()
    lacking = sorted("/".join(keys) for keys, count in missing.items() if count)
    if lacking:
        raise ValueError(f"parts of {', '.join(lacking[:3])} are missing")
    return whole

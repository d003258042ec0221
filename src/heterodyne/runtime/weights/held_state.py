"""What one rank holds of the state of all, told without asking anybody: the other ranks may not answer any more."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from heterodyne.runtime.weights.materialise import stored_tensors
from heterodyne.runtime.weights.ownership import Ownership
from heterodyne.runtime.weights.pieces import box_pieces, range_pieces

__all__ = ["held_pieces", "held_state"]


def held_state(
    module: nn.Module,
    optimizer: Mapping[str, Mapping[str, Any]],
    ownership: Ownership,
    rank: int,
    *,
    shards: Mapping[str, Tensor],
    before: Mapping[str, Tensor],
) -> dict[str, Any]:
    """Return the part of the state that this rank answers for: what several ranks hold is in `Pieces`, everything else is told by one rank.

    Nothing is copied. ``optimizer``: the state of what this rank updates, by name; ``shards``: what it holds of parameters that are
    sharded; ``before``: buffers that the step under way may have changed, as they were.
    """
    names = {id(tensor): name for name, tensor in stored_tensors(module)}
    model: dict[str, Any] = {}
    for entry, kept in module.state_dict(keep_vars=True).items():
        name = names.get(id(kept))
        if name is None:
            if rank == ownership.active[0]:
                model[entry] = kept
        elif ownership.apart and name in ownership.shards:
            pieces = range_pieces(name, shards[name], ownership, rank) if name in shards else None
            model |= {} if pieces is None else {entry: pieces}
        elif name in ownership.boxes:
            pieces = box_pieces(name, before.get(name, kept), ownership, rank)
            model |= {} if pieces is None else {entry: pieces}
        elif ownership.keeper(name) == rank:
            model[entry] = before.get(name, kept).detach()
    return {"model": model, "optimizer": held_pieces(optimizer, ownership, rank)}


def held_pieces(values: Mapping[str, Mapping[str, Any]], ownership: Ownership, rank: int) -> dict[str, dict[str, Any]]:
    """Return the part that this rank answers for of values by parameter: of what lies as the parameter does, its pieces."""
    found: dict[str, dict[str, Any]] = {}
    for name, entries in values.items():
        for key, value in entries.items():
            if _lies_as(name, value, ownership, rank):
                of = range_pieces if name in ownership.shards else box_pieces
                told: Any = of(name, value, ownership, rank)
            else:
                told = value if _teller(name, ownership) == rank else None
            if told is not None or (value is None and _teller(name, ownership) == rank):
                found.setdefault(name, {})[key] = told
    return found


def _lies_as(name: str, value: Any, ownership: Ownership, rank: int) -> bool:
    """Whether an entry is in parts as its parameter is."""
    if not isinstance(value, Tensor) or value.dim() != len(ownership.shapes[name]):
        return False
    if name in ownership.shards:
        start, stop = ownership.updated(rank, name) or (0, 0)
        return value.numel() == stop - start
    return name in ownership.boxes


def _teller(name: str, ownership: Ownership) -> int:
    if name in ownership.shards:
        return next(iter(next(iter(ownership.shards[name].values()))))
    return ownership.parts(name)[0][1] if name in ownership.boxes else ownership.keeper(name)

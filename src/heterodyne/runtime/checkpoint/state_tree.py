"""A nested state (dicts, lists, tuples, tensors, plain values) as named tensors and the skeleton that held them.

Checkpoints store tensors by name; what optimizers keep beside them (parameter groups, step counts, ``None``) stays in
the skeleton, with a `Leaf` in place of each tensor, or a `Cut` of one of which ranks have pieces. Where each rank has a part of a state,
the whole has all their parts.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from torch import Tensor

from heterodyne.errors import CheckpointError
from heterodyne.plan.boxes import numel
from heterodyne.runtime.weights.pieces import Piece, Pieces, Place

__all__ = ["Cut", "Leaf", "graft", "keys_of", "merged", "require_whole", "strip"]

_OF_PIECE = "//"
"""Between the path of a tensor and the place of a piece."""


@dataclass(frozen=True, slots=True)
class Leaf:
    """Where the tensor of that name was."""

    name: str


@dataclass(frozen=True, slots=True)
class Cut:
    """Where a tensor of that shape was, whose pieces have these names."""

    shape: tuple[int, ...]
    places: Mapping[str, Place]


def strip(state: Any, root: str) -> tuple[dict[str, Tensor], Any]:
    """The tensors of a state, named by their path from ``root``, and the skeleton. Raises ValueError for two of one name."""
    tensors: dict[str, Tensor] = {}

    def take(tensor: Tensor, name: str) -> None:
        if name in tensors:
            raise ValueError(f"two tensors of a state are called {name!r}")
        tensors[name] = tensor.detach()

    def visit(value: Any, path: str) -> Any:
        if isinstance(value, Tensor):
            take(value, path)
            return Leaf(path)
        if isinstance(value, Pieces):
            places = {f"{path}{_OF_PIECE}{_in_words(piece.place)}": piece.place for piece in value.of}
            for name, piece in zip(places, value.of, strict=True):
                take(piece.tensor, name)
            return Cut(value.whole, places)
        if isinstance(value, dict):
            return {key: visit(item, f"{path}/{key}") for key, item in value.items()}
        if type(value) in (list, tuple):
            return type(value)(visit(item, f"{path}/{index}") for index, item in enumerate(value))
        return value

    return tensors, visit(state, root)


def merged(skeletons: Sequence[Any]) -> Any:
    """The skeleton of the state that these are parts of: dicts have the keys of all, a tensor in pieces has those of all, everything else
    is that of the first part that has it. None is no part.
    """
    parts = [skeleton for skeleton in skeletons if skeleton is not None]
    if parts and all(isinstance(part, Cut) for part in parts):
        return Cut(parts[0].shape, {name: place for part in parts for name, place in part.places.items()})
    if len(parts) < 2 or not all(isinstance(part, dict) for part in parts):
        return parts[0] if parts else None
    keys = dict.fromkeys(key for part in parts for key in part)
    return {key: merged([part[key] for part in parts if key in part]) for key in keys}


def keys_of(name: str) -> list[str]:
    """The keys that lead to a tensor from the root, of which `strip` made its name; a key may have been cut where it has a ``/``."""
    return name.partition(_OF_PIECE)[0].split("/")[1:]


def graft(skeleton: Any, tensors: dict[str, Tensor], *, without: Collection[str] = ()) -> Any:
    """The inverse of `strip`; a tensor in pieces has those of all ranks. Tensors that the skeleton has no place for are left out.

    ``without``: names of tensors that are not asked for; in dicts, what has no other tensors is left out with them. Raises KeyError
    for any other that is missing.
    """
    if isinstance(skeleton, Leaf):
        return tensors[skeleton.name]
    if isinstance(skeleton, Cut):
        return Pieces(skeleton.shape, tuple(Piece(place, tensors[name]) for name, place in skeleton.places.items()))
    if isinstance(skeleton, dict):
        kept = {key: item for key, item in skeleton.items() if not without or not _is_without(item, without)}
        return {key: graft(item, tensors, without=without) for key, item in kept.items()}
    if type(skeleton) in (list, tuple):
        return type(skeleton)(graft(item, tensors, without=without) for item in skeleton)
    return skeleton


def require_whole(skeleton: Any, path: str = "state") -> None:
    """Raise CheckpointError, with the path, for a tensor of which pieces are missing."""
    if isinstance(skeleton, dict):
        for key, item in skeleton.items():
            require_whole(item, f"{path}/{key}")
    elif isinstance(skeleton, Cut):
        there = sum(_elements(place, skeleton.shape) for place in skeleton.places.values())
        if there != prod(skeleton.shape):
            raise CheckpointError(f"parts of {path} are missing")


def _elements(place: Place, shape: tuple[int, ...]) -> int:
    return numel(place.box, shape) if place.range is None else place.range[1] - place.range[0]


def _in_words(place: Place) -> str:
    of_box = ",".join(".".join(map(str, cut)) for cut in place.box)
    return of_box if place.range is None else f"{of_box};{place.range[0]}.{place.range[1]}"


def _is_without(skeleton: Any, without: Collection[str]) -> bool:
    leaves = list(_leaves(skeleton))
    return bool(leaves) and all(name in without for name in leaves)


def _leaves(skeleton: Any) -> Iterator[str]:
    """Yield the names of the tensors of a skeleton."""
    if isinstance(skeleton, Leaf):
        yield skeleton.name
    elif isinstance(skeleton, Cut):
        yield from skeleton.places
    elif isinstance(skeleton, dict | list | tuple):
        for item in skeleton.values() if isinstance(skeleton, dict) else skeleton:
            yield from _leaves(item)

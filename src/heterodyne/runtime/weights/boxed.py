"""Boxes of real tensors (`heterodyne.plan.boxes`)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from heterodyne.plan.boxes import Box, inside
from heterodyne.runtime.weights.ownership import Ownership

__all__ = ["Shards", "assembled", "boxed", "kept_shards"]

Shards = dict[str, list[tuple[Box, Tensor]]]


def boxed(tensor: Tensor, box: Box) -> Tensor:
    """The part of a tensor that is in a box; a view."""
    for cut in box:
        tensor = tensor.narrow(cut.dim, cut.first, cut.stop - cut.first)
    return tensor


def kept_shards(tensors: Mapping[str, Tensor], ownership: Ownership, rank: int) -> Shards:
    """Of tensors that lie as parameters do (their gradients), the pieces that a rank answers for, on the host."""
    found: Shards = {}
    for name, tensor in tensors.items():
        own = ownership.box(rank, name)
        pieces = [(box, boxed(tensor, inside(own, box)).cpu()) for box, of in ownership.parts(name) if of == rank]
        if pieces:
            found[name] = pieces
    return found


def assembled(gathered: Iterable[Shards], shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor]:
    """The tensors that all pieces together make."""
    whole: dict[str, Tensor] = {}
    for pieces in gathered:
        for name, of in pieces.items():
            for box, piece in of:
                into = whole.setdefault(name, torch.zeros(shapes[name], dtype=piece.dtype))
                boxed(into, box).copy_(piece)
    return whole

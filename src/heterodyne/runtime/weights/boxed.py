"""Boxes of real tensors (`heterodyne.plan.boxes`)."""

from __future__ import annotations

from torch import Tensor

from heterodyne.plan.boxes import Box

__all__ = ["boxed"]


def boxed(tensor: Tensor, box: Box) -> Tensor:
    """The part of a tensor that is in a box; a view."""
    for cut in box:
        tensor = tensor.narrow(cut.dim, cut.first, cut.stop - cut.first)
    return tensor

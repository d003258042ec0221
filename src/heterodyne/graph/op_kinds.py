"""What ops do to the values of their first tensor, by name: the one table for all who follow values through a graph.

A new op that only moves values is added here once. Lists of a reader say the kinds that it passes through, and what else it knows.
"""

from __future__ import annotations

__all__ = [
    "CASTS",
    "COPIES",
    "EXPANDS",
    "FILLED_LIKE",
    "JOINS",
    "LABELLED_LOSSES",
    "LIKE",
    "NEW",
    "RESHAPES",
    "SAME_VALUES",
    "SLICES",
    "SQUEEZES",
    "TRANSPOSES",
]

COPIES = frozenset({"alias", "clone", "contiguous", "detach", "lift_fresh_copy"})
"""The tensor itself, or a copy of it."""
CASTS = frozenset({"to", "_to_copy"})
"""The same values in another dtype, or on another device."""
RESHAPES = frozenset({"_unsafe_view", "flatten", "reshape", "unflatten", "view"})
"""The same elements in the same order, in other dims."""
SQUEEZES = frozenset({"squeeze", "unsqueeze"})
"""Dims of size 1 are taken away or put in."""
TRANSPOSES = frozenset({"movedim", "permute", "swapaxes", "swapdims", "t", "transpose"})
"""The dims in another order."""
EXPANDS = frozenset({"broadcast_to", "expand"})
"""Elements of dims of size 1 are read more than once."""
LIKE = frozenset({"expand_as", "reshape_as", "type_as", "view_as"})
"""As one of those above; a second tensor says the shape or the dtype, and none of its values are read."""
SLICES = frozenset({"chunk", "narrow", "select", "slice", "split", "split_with_sizes", "unbind"})
"""Some of the elements, or all of them in several tensors."""
JOINS = frozenset({"cat", "stack"})
"""The elements of several tensors."""

NEW = frozenset({"new_empty", "new_empty_strided", "new_full", "new_ones", "new_zeros"})
"""Another tensor, of which dtype and device are those of the first."""
FILLED_LIKE = frozenset({"empty_like", "full_like", "ones_like", "zeros_like"})
"""Another tensor, which has the shape of the first, too."""

SAME_VALUES = COPIES | CASTS | RESHAPES | SQUEEZES | TRANSPOSES | EXPANDS
"""All of the values and no others, of one tensor."""

LABELLED_LOSSES = frozenset({"cross_entropy_loss", "nll_loss", "nll_loss2d", "nll_loss_nd"})
"""Losses of labels that are numbers of classes, of which some may not count."""

"""Where an op computes with the size of a batch, or chooses rows by it, rather than making a shape of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import OpOverload

from heterodyne.frontend.arguments import argument
from heterodyne.frontend.flat_graph import tensors_of
from heterodyne.frontend.sample_order import Samples
from heterodyne.frontend.sizes import degree, size_of
from heterodyne.graph.op_kinds import EXPANDS, NEW

__all__ = ["cuts_by_size", "follows", "is_size", "is_size_as_value", "runs_along_rows"]


# Arguments that are shapes, by the names of the schema.
_SHAPES = frozenset({"size", "shape", "sizes", "repeats", "output_size", "stride"})
_SHAPED = (
    NEW
    | EXPANDS
    | {"_unsafe_view", "reshape", "unflatten", "view", "repeat", "resize_"}
    | {"empty", "empty_strided", "full", "normal", "ones", "rand", "randint", "randn", "zeros"}
)


def follows(node: fx.Node) -> bool:
    """Return whether the shape of a tensor that a node returns follows the batch."""
    return any(degree(t) > 0 for t in tensors_of(node))


def is_size(node: Any) -> bool:
    """Return whether a node is a number that is another one for another batch."""
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    return isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool) and bool(value.node.expr.free_symbols)


def is_size_as_value(node: fx.Node, name: str) -> bool:
    """Return whether an op computes with a number that follows the batch, rather than making a shape of it."""
    if not isinstance(node.target, OpOverload):
        return False
    for declared in node.target._schema.arguments:
        value = argument(node, declared.name)
        held = list(value) if isinstance(value, list | tuple) else [value]
        if not any(is_size(entry) for entry in held):
            continue
        if name in _SHAPED and declared.name in _SHAPES:
            continue
        if name in (
            "slice",
            "narrow",
            "select",
            "split",
            "split_with_sizes",
            "chunk",
            "repeat_interleave",
            "linspace",
            "eye",
            "randperm",
        ):
            continue  # which rows: see `cuts_by_size`, `_of_equal_rows`
        return True
    return False


def cuts_by_size(node: fx.Node, name: str, order: Mapping[fx.Node, Samples]) -> bool:
    """Return whether rows are chosen by their number, which then belong to some sample or other."""
    if name == "repeat_interleave":
        return any(is_size(n) for n in node.all_input_nodes) and not follows(node.all_input_nodes[0])
    if name not in ("slice", "narrow", "select") or not any(is_size(n) for n in node.all_input_nodes):
        return False
    source, dim = argument(node, "self"), argument(node, "dim")
    before, after = source.meta["val"].shape, node.meta["val"].shape
    if name != "select" and order[source].groups and order[source].dim is not None:
        return order[node].mixed  # whole groups are the rows of all samples
    return name == "select" or size_of(before[dim]) != size_of(after[dim])


def runs_along_rows(node: fx.Node) -> bool:
    source, dim = argument(node, "self"), argument(node, "dim")
    value = source.meta.get("val") if isinstance(source, fx.Node) else None
    return isinstance(value, Tensor) and isinstance(dim, int) and not size_of(value.shape[dim]).is_constant

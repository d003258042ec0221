"""Ops that work along the dim in which the samples are, so that a sample's result depends on other samples.

An op that is given a dim works along it, unless all it does is to lay out, take or put elements (`_LAYS_OUT`). Convolutions and
normalisations are given none: dim 0 has the samples, and all other dims are theirs.
"""

from __future__ import annotations

import re
from typing import Any

from torch import Tensor, fx

from heterodyne.frontend.arguments import argument, operator_name
from heterodyne.frontend.flat_graph import tensors_of
from heterodyne.frontend.sizes import degree, size_of
from heterodyne.graph.op_kinds import RESHAPES, SLICES, SQUEEZES, TRANSPOSES

__all__ = ["SORTS", "runs_along_the_samples", "works_along_the_samples"]

SORTS = frozenset({"sort", "argsort"})
# Of what is told a dim, these take, put or lay out elements along it: `sample_order` follows them.
_LAYS_OUT = SLICES | SQUEEZES | TRANSPOSES | RESHAPES | {
    "gather", "index_add", "index_copy", "index_fill", "index_reduce", "index_select", "repeat_interleave", "scatter", "scatter_add",
    "scatter_reduce", "select_scatter", "slice_scatter", "take_along_dim", "tensor_split", "tile",
}  # fmt: skip
# They are told no dim.
_OF_DIM = {"msort": 0, "flipud": 0, "fliplr": 1}
# Dims from this one on are normalised together.
_NORMALISES = {"group_norm": 1, "instance_norm": 2}
# Of this argument each element of the result may read any, in the dims from this one on.
_LOOKS_UP = {"bucketize": ("boundaries", 0), "grid_sampler": ("input", 2), "searchsorted": ("sorted_sequence", -1)}
_SPATIAL = re.compile(r"(?:conv|conv_transpose|\w*pool|upsample_\w+?)([123])d")


def works_along_the_samples(node: fx.Node) -> bool:
    """Return whether each element of the result depends on others along a dim of the samples. Integers may be sorted along it."""
    name = operator_name(node).removesuffix("_")
    if name == "scaled_dot_product_attention":
        query = _tensor(argument(node, "query"))
        return query is not None and not size_of(query.shape[-2]).is_constant
    if (looked_up := _LOOKS_UP.get(re.sub(r"_[23]d$", "", name))) is not None:
        table = _tensor(argument(node, looked_up[0]))
        return table is not None and any(not size_of(size).is_constant for size in table.shape[looked_up[1] :])
    source = _tensor(argument(node, "self"))
    if source is None:
        source = _tensor(argument(node, "input"))
    if source is None or (name in SORTS and not source.is_floating_point()):
        return False
    at = {dim for dim, size in enumerate(source.shape) if not size_of(size).is_constant}
    if not any(degree(tensor) >= max(1, degree(source)) for tensor in tensors_of(node)):
        return False  # it reduces, which shows in the shape
    if name in _OF_DIM:
        return _OF_DIM[name] in at
    if name in _NORMALISES:
        return any(dim >= _NORMALISES[name] for dim in at)
    if name == "renorm":  # each slice of ``dim`` by the norm of all that is in it
        return bool(at - {argument(node, "dim") % source.dim()})
    if (spatial := _SPATIAL.match(name)) and not isinstance(argument(node, "groups"), fx.Node):
        inner = int(spatial[1]) + ("conv" in name)  # a convolution adds over the channels too
        return bool(at & set(range(source.dim() - inner, source.dim())))
    return name not in _LAYS_OUT and _is_told_a_dim(node) and runs_along_the_samples(node)


def runs_along_the_samples(node: fx.Node) -> bool:
    """Return whether a dim that an op is given is one of the samples."""
    source = _tensor(argument(node, "self"))
    if source is None:
        return False
    given = argument(node, "dims") if argument(node, "dims") is not None else argument(node, "dim")
    dims = list(given) if isinstance(given, list | tuple) else [] if given is None else [given]
    over = dims or list(range(source.dim()))  # without dims they go through all
    return any(isinstance(dim, int) and not size_of(source.shape[dim]).is_constant for dim in over)


def _is_told_a_dim(node: fx.Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return schema is not None and any(declared.name in ("dim", "dims") for declared in schema.arguments)


def _tensor(value: Any) -> Tensor | None:
    found = value.meta.get("val") if isinstance(value, fx.Node) else None
    return found if isinstance(found, Tensor) else None

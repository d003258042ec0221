"""In which dim of a tensor the samples lie, and whether they lie there in order.

A tensor that follows the batch has a dim of k * b. Where rows ``k * i`` to ``k * (i + 1)`` of it are those of sample i, samples can
be cut out of it: [B*T, C] made of [B, T, C] is such, [T*B, C] is not, though their shapes are alike. Shapes alone do not tell
them apart, so the order is followed through the graph, and what is not known to keep it counts as having lost it. It is found
again where row by row something is joined to what has kept it (the experts' output to the residual stream): were the rows of
other samples, the samples would depend on each other, and such a model is refused when it is captured.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor, fx

from heterodyne.frontend.arguments import argument, operator_name
from heterodyne.frontend.describe import producer_of
from heterodyne.frontend.sizes import proportional, spec_of
from heterodyne.graph import TensorSpec

__all__ = ["Samples", "samples_in"]

# They lay the same elements out in other dims, in the same order.
_RESHAPES = frozenset({"view", "reshape", "_unsafe_view", "flatten", "unflatten", "view_as", "reshape_as"})
# They join row i of one tensor to row i of another.
_JOINS = frozenset({
    "add", "add_", "addcmul", "baddbmm", "bmm", "div", "div_", "matmul", "mul", "mul_", "scaled_dot_product_attention", "sub", "sub_",
})  # fmt: skip
# Of a tensor they read dtype and device alone.
_MAKES_NEW = frozenset({"new_empty", "new_full", "new_ones", "new_zeros"})
# They put what lies along their ``dim`` in another order.
_ALONG = frozenset({"argsort", "cat", "flip", "gather", "roll", "sort", "topk"})
# They may put the rows of any dim in another order.
_REORDERS = frozenset({
    "as_strided", "index", "index_add", "index_add_", "index_copy", "index_put", "index_put_", "index_select", "masked_select",
    "repeat", "scatter", "scatter_", "scatter_add", "scatter_add_", "take", "take_along_dim", "tile", "unfold", "_unsafe_index",
})  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Samples:
    """Where the samples of a tensor lie: ``dim`` has ``rows`` for each of them; ``ordered``: sample by sample.

    ``dim`` is None for a tensor that is the same whatever the samples, and (then ``ordered`` is False) for one that follows them
    in another way: a count over all of them, something for each pair.
    """

    dim: int | None
    rows: int
    ordered: bool


def samples_in(graph: fx.Graph) -> Mapping[fx.Node, Samples]:
    """For each node that returns one tensor, where its samples lie."""
    found: dict[fx.Node, Samples] = {}
    for node in graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, Tensor):
            found[node] = _samples(node, spec_of(value), found)
    return found


def _samples(node: fx.Node, spec: TensorSpec, found: Mapping[fx.Node, Samples]) -> Samples:
    dims = [dim for dim, size in enumerate(spec.shape) if not size.is_constant]
    if not dims:
        return Samples(dim=None, rows=0, ordered=not _read_by(node, found) or operator_name(node) in _MAKES_NEW)
    if len(dims) > 1 or not proportional(spec.shape[dims[0]]):
        return Samples(dim=None, rows=0, ordered=False)
    (dim,) = dims
    rows = int(spec.shape[dim].coefficients[1])
    return Samples(dim=dim, rows=rows, ordered=_keeps_order(node, dim, rows, spec, found))


def _keeps_order(node: fx.Node, dim: int, rows: int, spec: TensorSpec, found: Mapping[fx.Node, Samples]) -> bool:
    if node.op == "placeholder":
        return True
    producer = producer_of(node)
    name = operator_name(producer)
    sources = _read_by(node, found)
    kept = [n for n in sources if found[n].ordered]
    if name in _JOINS and any(found[n].rows == rows for n in kept):
        return True
    if len(kept) < len(sources):
        return False
    if not sources:
        return True  # made for the batch as it is, as zeros are
    if name in _RESHAPES:
        at = found[sources[0]].dim
        return at is not None and _before(spec_of(sources[0].meta["val"]), at) == _before(spec, dim)
    if not any(found[n].rows == rows for n in sources) or name in _REORDERS:
        return False
    return name not in _ALONG or not _along_the_samples(producer, dim, len(spec.shape))


def _read_by(node: fx.Node, found: Mapping[fx.Node, Samples]) -> list[fx.Node]:
    """What follows the batch of what a node is made of; for one output of several, of what the op read that returned them."""
    sources = producer_of(node).all_input_nodes
    return [n for n in sources if n in found and (found[n].dim is not None or not found[n].ordered)]


def _before(spec: TensorSpec, dim: int) -> float:
    """How many times the samples are run through."""
    return math.prod(size(1) for size in spec.shape[:dim])


def _along_the_samples(node: fx.Node, dim: int, dims: int) -> bool:
    given = argument(node, "dims") if argument(node, "dims") is not None else argument(node, "dim")
    along = given if isinstance(given, list | tuple) else [given]
    return not along or any(at is None or at % dims == dim for at in along)

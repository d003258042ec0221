"""In which dim of a tensor the samples are, and whether they are there in order.

A tensor that follows the batch has a dim of g * b * k rows: g groups, one after the other, each with k rows of sample 0, then of
sample 1. Inputs that are joined (``torch.cat([chosen, rejected])``) make 2 groups of 1 row; [B, T, C] as [B*T, C] has 1 group of T
rows, [T, B, C] as [T*B, C] has T groups of 1. Where rows ``k * i`` to ``k * (i + 1)`` of it are those of sample i, samples can
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
from heterodyne.frontend.sizes import proportional, size_of, spec_of
from heterodyne.graph import TensorSpec
from heterodyne.graph.op_kinds import NEW, RESHAPES, SLICES

__all__ = ["Samples", "samples_in"]

# They lay the same elements out in other dims, in the same order.
_RESHAPES = RESHAPES | {"reshape_as", "view_as"}
# They join row i of one tensor to row i of another.
_JOINS = frozenset({
    "add", "add_", "addcmul", "baddbmm", "bmm", "div", "div_", "matmul", "mul", "mul_", "scaled_dot_product_attention", "sub", "sub_",
})  # fmt: skip
# They put what lies along their ``dim`` in another order.
_ALONG = frozenset({"argsort", "cat", "flip", "gather", "roll", "sort", "topk"})
# They take some of the rows along their ``dim``.
_CUTS = SLICES - {"select", "unbind"}
# They may put the rows of any dim in another order.
_REORDERS = frozenset({
    "as_strided", "index", "index_add", "index_add_", "index_copy", "index_put", "index_put_", "index_select", "masked_select",
    "repeat", "scatter", "scatter_", "scatter_add", "scatter_add_", "take", "take_along_dim", "tile", "unfold", "_unsafe_index",
})  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Samples:
    """Where the samples of a tensor are: ``dim`` has ``rows`` for each of them, in so many ``groups`` (0: not known).

    ``dim`` is None for a tensor that is the same whatever the samples, and (then ``ordered`` is False) for one that follows them
    in another way: a count over all of them, something for each pair. ``mixed``: its rows were some samples' and are now parts
    of several. ``made``: it was made for the batch, of no sample.
    """

    dim: int | None
    rows: int
    groups: int
    mixed: bool = False
    made: bool = False

    @property
    def ordered(self) -> bool:
        """Return whether they are sample by sample."""
        return self.groups == 1


def samples_in(graph: fx.Graph) -> Mapping[fx.Node, Samples]:
    """For each node that returns one tensor, where its samples are."""
    found: dict[fx.Node, Samples] = {}
    for node in graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, Tensor):
            found[node] = _samples(node, spec_of(value), found)
    return found


def _samples(node: fx.Node, spec: TensorSpec, found: Mapping[fx.Node, Samples]) -> Samples:
    dims = [dim for dim, size in enumerate(spec.shape) if not size.is_constant]
    sources = _read_by(node, found)
    if not dims:
        same = not sources or operator_name(node) in NEW
        return Samples(dim=None, rows=0, groups=int(same), made=same)
    if len(dims) > 1 or not proportional(spec.shape[dims[0]]):
        return Samples(dim=None, rows=0, groups=0)
    (dim,) = dims
    rows = int(spec.shape[dim].coefficients[1])
    made = node.op != "placeholder" and all(found[n].made for n in sources)
    groups = 1 if node.op == "placeholder" or not sources else _groups(node, dim, rows, spec, found)
    return Samples(dim=dim, rows=rows, groups=groups or 0, mixed=groups is None, made=made)


def _groups(node: fx.Node, dim: int, rows: int, spec: TensorSpec, found: Mapping[fx.Node, Samples]) -> int | None:
    """In how many groups the samples are laid out in ``dim``; 0: not known; None: its rows belong to several samples."""
    producer = producer_of(node)
    name = operator_name(producer)
    sources = _read_by(node, found)
    of_samples = [
        n for n in sources if not found[n].made
    ] or sources  # what was made for the batch has no order of its own
    like = {found[n].groups for n in of_samples if found[n].rows == rows and found[n].groups}
    if name in _JOINS and like:
        return min(like)
    if name == "index" and _own_rows(producer, found):
        return 1
    if any(not found[n].groups or found[n].dim is None for n in sources):
        return 0
    first = found[sources[0]]
    if name in _RESHAPES:
        return _regrouped(_before(spec_of(sources[0].meta["val"]), first.dim) * first.groups, _before(spec, dim), rows)
    if name in _CUTS and _along_the_samples(producer, dim, len(spec.shape)):
        return _cut(producer, name, first, rows)
    if name == "cat" and _along_the_samples(producer, dim, len(spec.shape)):
        return _joined(
            [found[n] for n in _operands(producer) if n in found and found[n].groups], len(_operands(producer))
        )
    if len(like) != 1 or name in _REORDERS:
        return 0
    (groups,) = like
    return 0 if name in _ALONG and _along_the_samples(producer, dim, len(spec.shape)) else groups


def _own_rows(node: fx.Node, found: Mapping[fx.Node, Samples]) -> bool:
    """Return whether something is taken of each sample, in their order: ``hidden[torch.arange(len(hidden)), last]``."""
    source, indices = found[argument(node, "self")], argument(node, "indices")
    if source.dim is None or not source.ordered or source.rows != 1 or source.dim >= len(indices):
        return False
    at = indices[source.dim]
    return (
        isinstance(at, fx.Node)
        and operator_name(at) == "arange"
        and (argument(at, "start") or 0, argument(at, "step") or 1) == (0, 1)
        and found[at].rows == 1
        and all(index is None or index.meta["val"].dim() == 1 for index in indices)
    )


def _regrouped(runs: float, before: float, rows: int) -> int | None:
    """After a reshape that runs through the samples ``runs`` times, ``before`` of them in dims before theirs."""
    groups = runs / before
    return int(groups) if groups == int(groups) and rows % int(groups) == 0 else None


def _cut(node: fx.Node, name: str, source: Samples, rows: int) -> int | None:
    """Return the group of rows that are taken from a dim: whole groups, or the same rows of each sample."""
    of_group = source.rows // source.groups
    if name in ("split", "split_with_sizes", "chunk"):
        return None if rows % of_group else rows // of_group
    start, step = argument(node, "start") or 0, argument(node, "step") or 1
    if step != 1:
        inside = isinstance(start, int) and 0 <= start < step and of_group % step == 0
        return source.groups if inside else None
    if rows == source.rows:
        return source.groups
    if isinstance(start, fx.Node):
        first = size_of(start.meta["val"])
        if not proportional(first):
            return None
        start = int(first.coefficients[1])
    elif start:
        return None
    return None if rows % of_group or start % of_group else rows // of_group


def _operands(node: fx.Node) -> list[fx.Node]:
    tensors = argument(node, "tensors")
    return list(tensors) if isinstance(tensors, list | tuple) else []


def _joined(parts: list[Samples], operands: int) -> int:
    """Return the group of tensors one after the other: their groups together, where they have as many rows a sample in each."""
    like = {part.rows // part.groups for part in parts}
    return sum(part.groups for part in parts) if len(like) == 1 and len(parts) == operands else 0


def _read_by(node: fx.Node, found: Mapping[fx.Node, Samples]) -> list[fx.Node]:
    """Return what follows the batch of what a node is made of; for one output of several, of what the op read that returned them."""
    sources = producer_of(node).all_input_nodes
    return [n for n in sources if n in found and (found[n].dim is not None or not found[n].ordered)]


def _before(spec: TensorSpec, dim: int | None) -> float:
    """Return how many times the samples are run through."""
    return math.prod(size(1) for size in spec.shape[:dim])


def _along_the_samples(node: fx.Node, dim: int, dims: int) -> bool:
    given = argument(node, "dims") if argument(node, "dims") is not None else argument(node, "dim")
    along = given if isinstance(given, list | tuple) else [given]
    return not along or any(at is None or at % dims == dim for at in along)

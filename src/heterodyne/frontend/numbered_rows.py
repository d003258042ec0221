"""Which operand of an op numbers the rows of another: ``at`` in ``h[at]``, the indices of an embedding, the offsets of its bags."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, fx

from heterodyne.frontend.arguments import argument, mutates, operator_name
from heterodyne.frontend.sizes import size_of

__all__ = ["NumberedRows", "numbered_rows"]

# Of each op what is numbered, the dim along which (an argument, or a number) and what numbers it. Names without the underscore of those
# that write in place.
_OPERANDS: dict[str, tuple[tuple[str, str | int, str], ...]] = {
    "embedding": (("weight", 0, "indices"),),
    "embedding_bag": (("weight", 0, "indices"), ("indices", 0, "offsets")),
    "gather": (("self", "dim", "index"),),
    "index_add": (("self", "dim", "index"),),
    "index_copy": (("self", "dim", "index"),),
    "index_fill": (("self", "dim", "index"),),
    "index_reduce": (("self", "dim", "index"),),
    "index_select": (("self", "dim", "index"),),
    "repeat_interleave": (("self", "dim", "repeats"),),
    "roi_align": (("input", 0, "rois"),),
    "roi_pool": (("input", 0, "rois"),),
    "ps_roi_align": (("input", 0, "rois"),),
    "ps_roi_pool": (("input", 0, "rois"),),
    "put": (("self", "dim", "index"),),
    "scatter": (("self", "dim", "index"),),
    "scatter_add": (("self", "dim", "index"),),
    "scatter_reduce": (("self", "dim", "index"),),
    "take": (("self", "dim", "index"),),
    "take_along_dim": (("self", "dim", "indices"),),
}
_INDEXED = frozenset({"index", "index_put", "_unsafe_index", "_unsafe_index_put"})
_WRITES = frozenset({
    "index_add", "index_copy", "index_fill", "index_put", "index_reduce", "put", "scatter", "scatter_add", "scatter_reduce",
    "_unsafe_index_put",
})  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class NumberedRows:
    """Rows of ``source`` along ``dim`` (None: its elements, as if it had one dim) are numbered by ``index``; ``written``: they change."""

    source: fx.Node
    dim: int | None
    index: fx.Node
    written: bool

    @property
    def follows(self) -> bool:
        """Return whether there are as many rows as the batch has them."""
        shape = self.source.meta["val"].shape
        return any(not size_of(size).is_constant for size in (shape if self.dim is None else [shape[self.dim]]))


def numbered_rows(node: fx.Node) -> Iterator[NumberedRows]:
    """Yield what an op takes, or writes, by number."""
    full = operator_name(node)
    name = full.removesuffix("_")
    for source, dim, index in _operands(node, name):
        if isinstance(source, fx.Node) and isinstance(index, fx.Node) and _has_numbers(index):
            place = None if dim is None else dim % max(1, source.meta["val"].dim())
            yield NumberedRows(
                source=source, dim=place, index=index, written=name in _WRITES or source in mutates(node)
            )


def _operands(node: fx.Node, name: str) -> Iterator[tuple[object, int | None, object]]:
    if name in _INDEXED:
        for place, index in enumerate(argument(node, "indices")):
            yield argument(node, "self"), place, index
    for source, dim, index in _OPERANDS.get(name, ()):
        yield argument(node, source), dim if isinstance(dim, int) else argument(node, dim), argument(node, index)


def _has_numbers(node: fx.Node) -> bool:
    """Return whether a tensor holds numbers: a mask says of each row whether it is taken."""
    value = node.meta.get("val")
    return isinstance(value, Tensor) and value.dtype is not torch.bool

"""Samples that see each other: what no weighting of the parts of a batch can serve, since each device has its own samples.

The shapes tell. An op that reads samples, and gives one thing for all of them, something for each pair, or a number of things
that is not in proportion to theirs, has mixed them; so has one that works along the dim in which the samples lie. What the
loss itself sums over the samples is known by then (``passed``), and BatchNorm is served by the runtime.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from torch import Tensor, fx

from heterodyne.errors import CaptureError
from heterodyne.frontend.arguments import argument, leading_to, operator_name
from heterodyne.frontend.export import Traced, tensors_of
from heterodyne.frontend.faults import line_of
from heterodyne.frontend.sizes import degree, proportional, size_of

__all__ = ["coupled", "refuse_coupling"]

# Each element of their result depends on others along ``dim`` (``dims``).
_ALONG = frozenset({
    "softmax", "log_softmax", "_softmax", "_log_softmax", "cumsum", "cumprod", "cummax", "cummin", "logcumsumexp", "flip", "roll",
    "sort", "topk",
})  # fmt: skip

_COUNTING = frozenset({"histc"})  # returns floats that are whole numbers


def refuse_coupling(traced: Traced, from_batch: Collection[fx.Node], passed: Collection[fx.Node]) -> None:
    """Raise CaptureError, with the line, if something on the way to the loss lets the samples of a batch see each other.

    Whole numbers and truth values are let through: they choose and count (the tokens of an expert), and what they choose is seen.
    """
    for node in leading_to([traced.loss]):
        name = operator_name(node)
        if node not in from_batch or node.op != "call_function" or "batch_norm" in name or name in _COUNTING:
            continue
        tensors = [tensor for tensor in tensors_of(node) if tensor.is_floating_point()]
        read = [t for n in node.all_input_nodes if n in from_batch for t in tensors_of(n) if t.is_floating_point()]
        reads_samples = any(degree(tensor) > 0 for tensor in read)
        one_for_all = reads_samples and node not in passed and any(degree(tensor) == 0 for tensor in tensors)
        if one_for_all or any(_mixed(tensor) for tensor in tensors) or _along_the_samples(node):
            raise coupled(node)


def coupled(node: fx.Node) -> CaptureError:
    """What to say of an op that lets them see each other."""
    place = f"{line}\n" if (line := line_of(node, full=True)) else ""
    return CaptureError(
        f"{place}{node.target} makes the samples of a batch depend on each other, and the devices each see only "
        "their own samples. Average over the samples only in the loss; BatchNorm is the one exception that is known."
    )


def _mixed(tensor: Tensor) -> bool:
    """Something for each pair of samples, or one sample more or less than there are."""
    sizes = [size_of(size) for size in tensor.shape]
    return degree(tensor) > 1 or any(not size.is_constant and not proportional(size) for size in sizes)


def _along_the_samples(node: fx.Node) -> bool:
    name = operator_name(node)
    if name == "scaled_dot_product_attention":
        query = _tensor(argument(node, "query"))
        return query is not None and not size_of(query.shape[-2]).is_constant
    source = _tensor(argument(node, "self")) if name in _ALONG else None
    if source is None or not source.is_floating_point():
        return False
    given = argument(node, "dims") if argument(node, "dims") is not None else argument(node, "dim")
    dims = list(given) if isinstance(given, list | tuple) else [given]
    over = dims or list(range(source.dim()))  # roll without dims goes through all of them
    return any(isinstance(dim, int) and not size_of(source.shape[dim]).is_constant for dim in over)


def _tensor(value: Any) -> Tensor | None:
    found = value.meta.get("val") if isinstance(value, fx.Node) else None
    return found if isinstance(found, Tensor) else None

"""Floating point operations of each op, as polynomials in the batch.

A multiply-add counts 2. Contractions (everything that is a matrix product at heart) are counted exactly, with the
formulas of `torch.utils.flop_counter`; moving data counts nothing; every other op counts one for each element that it
writes (or reads, if it reduces), which is right in order of magnitude and small beside the contractions.

The backward of a contraction has one contraction of the same size for each operand that needs a gradient. Fused
attention computes its scores once more on the way back: five products for two, where four would do; with a mask that learns it
is not fused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, fx

from heterodyne.errors import CaptureError
from heterodyne.frontend.arguments import argument, operator_name
from heterodyne.frontend.sizes import size_of
from heterodyne.graph import Size
from heterodyne.graph.op_kinds import JOINS, LIKE, SAME_VALUES, SLICES
from heterodyne.graph.size import ZERO

__all__ = ["flops"]

# Names of operators whose whole work is to move, name or make data.
_MOVES = SAME_VALUES | LIKE | SLICES | JOINS | {
    "arange", "as_strided", "constant_pad_nd", "copy", "copy_", "detach_", "diagonal", "embedding", "empty", "empty_like",
    "empty_permuted", "eye", "fill", "fill_", "flip", "full", "full_like", "gather", "getitem", "index", "index_put", "index_put_",
    "index_select", "masked_fill", "masked_fill_", "meshgrid", "new_empty", "new_full", "new_ones", "new_zeros", "ones", "ones_like",
    "pad", "pixel_shuffle", "rand", "rand_like", "randint", "randn", "randn_like", "repeat", "repeat_interleave", "resolve_conj",
    "roll", "scalar_tensor", "scatter", "tile", "tril", "triu", "where", "zero_", "zeros", "zeros_like",
}  # fmt: skip


def flops(node: fx.Node, differentiable: Callable[[fx.Node], bool]) -> tuple[Size, Size]:
    """Forward and backward FLOPs of an op.

    Args:
        node: the op.
        differentiable: whether gradients flow into what a node returns.
    """
    name = operator_name(node)
    written = _written(node)
    rule = _CONTRACTIONS.get(name)
    if rule is not None:
        forward, operands = rule(node)
        needed = sum(map(differentiable, operands)) if differentiable(node) else 0
        if name in _ATTENTION:
            mask = argument(node, "attn_mask")
            fused = not (isinstance(mask, fx.Node) and differentiable(mask))
            return forward, _halves(forward, 5 if fused else 4) if needed else ZERO
        return forward, forward * needed
    if name in _MOVES:
        return ZERO, ZERO
    read = max((_numel(n.meta["val"]) for n in node.all_input_nodes if _is_tensor(n)), key=_at_two, default=ZERO)
    work = max(read, written, key=_at_two)
    gradients = any(differentiable(n) for n in node.all_input_nodes) and differentiable(node)
    return work, work if gradients else ZERO


Counted = tuple[Size, tuple[fx.Node, ...]]  # forward FLOPs, and the operands whose gradients are contractions too


def _linear(node: fx.Node) -> Counted:
    x, weight = _nodes(node, 2)
    return _numel(x.meta["val"]) * size_of(weight.meta["val"].shape[0]) * 2, (x, weight)


def _matmul(node: fx.Node) -> Counted:
    """[..., n, k] @ [..., k, m], vectors included: the output's elements, each a sum over the last dim of the first."""
    a, b = _nodes(node, 2)
    return _written(node) * size_of(a.meta["val"].shape[-1]) * 2, (a, b)


def _add_matmul(node: fx.Node) -> Counted:
    _, a, b = _nodes(node, 3)
    return _written(node) * size_of(a.meta["val"].shape[-1]) * 2, (a, b)


def _sum_of_matmuls(node: fx.Node) -> Counted:
    """addbmm: the products of a batch of matrices are added up."""
    _, a, b = _nodes(node, 3)
    return _numel(a.meta["val"]) * size_of(b.meta["val"].shape[-1]) * 2, (a, b)


def _convolution(node: fx.Node) -> Counted:
    """Every output element is a sum over the weight of its channel: [out, in/groups, *kernel]."""
    x, weight = _nodes(node, 2)
    per_output = Size.of(1)
    for size in weight.meta["val"].shape[1:]:
        per_output = per_output * size_of(size)
    return _written(node) * per_output * 2, (x, weight)


def _transposed_convolution(node: fx.Node) -> Counted:
    """Every input element is spread over the weight of its channel: [in, out/groups, *kernel]."""
    x, weight = _nodes(node, 2)
    per_input = Size.of(1)
    for size in weight.meta["val"].shape[1:]:
        per_input = per_input * size_of(size)
    return _numel(x.meta["val"]) * per_input * 2, (x, weight)


def _general_convolution(node: fx.Node) -> Counted:
    return _transposed_convolution(node) if node.args[6] else _convolution(node)


def _attention(node: fx.Node) -> Counted:
    """Q K^T, then the weights times V. Query [..., q, d], key [..., k, d], value [..., k, v]. A causal mask saves nothing here."""
    query, key, value = _nodes(node, 3)
    scores = _numel(query.meta["val"]) * size_of(key.meta["val"].shape[-2])
    values = _written(node) * size_of(value.meta["val"].shape[-2])
    return (scores + values) * 2, (query, key, value)


def _einsum(node: fx.Node) -> Counted:
    """Pairwise from left to right, as PyTorch does without opt_einsum: each step costs the product of the indices that it has."""
    equation = str(node.args[0]).replace(" ", "")
    operands = tuple(n for n in node.args[1] if isinstance(n, fx.Node))  # type: ignore[union-attr]  # a list by the schema
    terms, _, result = equation.partition("->")
    indices = terms.split(",")
    if "." in equation or len(operands) == 1:
        return max((_numel(n.meta["val"]) for n in operands), key=_at_two), operands
    sizes = {
        i: size_of(s)
        for term, n in zip(indices, operands, strict=True)
        for i, s in zip(term, n.meta["val"].shape, strict=True)
    }
    total, left = ZERO, set(indices[0])
    for position, term in enumerate(indices[1:], start=1):
        met = left | set(term)
        step = Size.of(2)
        for index in sorted(met):
            step = step * sizes[index]
        total = total + step
        left = met & (set(result) | {i for later in indices[position + 1 :] for i in later})
    return total, operands


def _grouped_matmul(node: fx.Node) -> Counted:
    """Rows of a, each with the matrix of its group: [rows, k] with [groups, k, m]."""
    a, b = _nodes(node, 2)
    return _numel(a.meta["val"]) * size_of(b.meta["val"].shape[-1]) * 2, (a, b)


def _experts(node: fx.Node) -> Counted:
    """Each choice is multiplied with the matrices of its expert: indices [N, k], [experts, 2 I, H] and [experts, H, I]."""
    tokens, indices, _, gate_up, down = _nodes(node, 5)
    of_one = Size.total(_numel(n.meta["val"][0]) for n in (gate_up, down))
    return _numel(indices.meta["val"]) * of_one * 2, (tokens, gate_up)


def _recurrent(node: fx.Node) -> Counted:
    """lstm, gru, rnn: each weight matrix is multiplied with each step of each sample once. Input [steps, batch, width], in either order."""
    tensors = [n for n in node.all_input_nodes if _is_tensor(n)]
    steps = size_of(tensors[0].meta["val"].shape[0]) * size_of(tensors[0].meta["val"].shape[1])
    weights = Size.total(_numel(n.meta["val"]) for n in tensors if n.meta["val"].dim() == 2)
    matrix = next(n for n in tensors if n.meta["val"].dim() == 2)
    return steps * weights * 2, (tensors[0], matrix)


_ATTENTION = frozenset({"scaled_dot_product_attention"})
_CONTRACTIONS: dict[str, Callable[[fx.Node], Counted]] = {
    "linear": _linear,
    **dict.fromkeys(("matmul", "mm", "bmm", "mv", "dot", "vdot", "inner"), _matmul),
    **dict.fromkeys(("addmm", "addmm_", "baddbmm", "baddbmm_", "addmv"), _add_matmul),
    "addbmm": _sum_of_matmuls,
    **dict.fromkeys(("conv1d", "conv2d", "conv3d"), _convolution),
    **dict.fromkeys(("conv_transpose1d", "conv_transpose2d", "conv_transpose3d"), _transposed_convolution),
    "convolution": _general_convolution,
    "scaled_dot_product_attention": _attention,
    "einsum": _einsum,
    **dict.fromkeys(("grouped_mm_fallback", "_grouped_mm"), _grouped_matmul),
    "experts": _experts,
    **dict.fromkeys(("lstm", "gru", "rnn_tanh", "rnn_relu"), _recurrent),
}


def _nodes(node: fx.Node, count: int) -> list[fx.Node]:
    nodes = [n for n in (*node.args, *node.kwargs.values()) if isinstance(n, fx.Node)]
    if len(nodes) < count:
        raise CaptureError(f"{node.target} has {len(nodes)} tensors, where {count} are expected")
    return nodes[:count]


def _is_tensor(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), Tensor)


def _numel(tensor: Tensor) -> Size:
    product = Size.of(1)
    for size in tensor.shape:
        product = product * size_of(size)
    return product


def _written(node: fx.Node) -> Size:
    value: Any = node.meta.get("val")
    values: Sequence[Any] = value if isinstance(value, tuple | list) else (value,)
    return Size.total(_numel(v) for v in values if isinstance(v, Tensor))


def _halves(size: Size, count: int) -> Size:
    """That many halves, in whole numbers: a contraction is an even number of operations."""
    return Size(tuple(int(c) * count // 2 for c in size.coefficients))


def _at_two(size: Size) -> float:
    """Sizes are compared at a batch of 2: 1 would hide what grows with the square."""
    return size(2)

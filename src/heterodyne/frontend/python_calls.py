"""Operators as the Python functions that a model calls for them.

A function mode sees what a model calls: ``torch.nn.functional.dropout``, not ``aten.dropout.default``. So that whoever stands in
for a function stands in for it here too, an op of the graph becomes a call of that function. And what the trace fixed because
the model was in training (whether dropout drops, which statistics BatchNorm takes) follows a flag again.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
from torch import Tensor, fx
from torch._ops import OpOverload
from torch.nn import functional as F

from heterodyne import products
from heterodyne.frontend.arguments import argument, operator_name

__all__ = ["follow_training", "to_python"]

Function = Callable[..., Any]

# Their Python functions take the same arguments in the same order.
_SAME: Final[Mapping[str, Function]] = {
    "aten::addmm": products.addmm,
    "aten::alpha_dropout": torch.alpha_dropout,
    "aten::baddbmm": torch.baddbmm,
    "aten::bernoulli": torch.bernoulli,
    "aten::bernoulli_": Tensor.bernoulli_,
    "aten::bmm": torch.bmm,
    "aten::conv1d": F.conv1d,
    "aten::conv2d": F.conv2d,
    "aten::conv3d": F.conv3d,
    "aten::conv_transpose1d": F.conv_transpose1d,
    "aten::conv_transpose2d": F.conv_transpose2d,
    "aten::conv_transpose3d": F.conv_transpose3d,
    "aten::dropout": F.dropout,
    "aten::exponential_": Tensor.exponential_,
    "aten::feature_dropout": torch.feature_dropout,
    "aten::linear": products.linear,
    "aten::matmul": torch.matmul,
    "aten::mm": torch.mm,
    "aten::normal": torch.normal,
    "aten::normal_": Tensor.normal_,
    "aten::rand": torch.rand,
    "aten::rand_like": torch.rand_like,
    "aten::randint": torch.randint,
    "aten::randint_like": torch.randint_like,
    "aten::randn": torch.randn,
    "aten::randn_like": torch.randn_like,
    "aten::random_": Tensor.random_,
    "aten::rms_norm": F.rms_norm,
    "aten::scaled_dot_product_attention": F.scaled_dot_product_attention,
    "aten::uniform_": Tensor.uniform_,
    # For speed alone: a call by the operator's own name takes about twice as long as by these.
    "aten::contiguous": Tensor.contiguous,
    "aten::cos": torch.cos,
    "aten::expand": Tensor.expand,
    "aten::gelu": F.gelu,
    "aten::neg": torch.neg,
    "aten::permute": torch.permute,
    "aten::relu": torch.relu,
    "aten::reshape": torch.reshape,
    "aten::rsqrt": torch.rsqrt,
    "aten::sin": torch.sin,
    "aten::tanh": torch.tanh,
    "aten::transpose": torch.transpose,
    "aten::unsqueeze": torch.unsqueeze,
    "aten::view": Tensor.view,
}

# Overloads with arguments of their own, which their Python functions do not take, or take in another way.
_OWN_NAME: Final = frozenset({"aten::view.dtype", "aten::bernoulli.out", "aten::matmul.out"})

_ARITHMETIC: Final[Mapping[str, Function]] = {
    "aten::add.Tensor": torch.add,
    "aten::div.Tensor": torch.div,
    "aten::mul.Tensor": torch.mul,
    "aten::pow.Tensor_Scalar": torch.pow,
    "aten::sub.Tensor": torch.sub,
}

_FLAGS: Final = ("train", "training")


def to_python(node: fx.Node) -> None:
    """Let a node call the Python function of its operator, if there is one; else leave it as it is."""
    if not isinstance(node.target, OpOverload):
        return
    special = _SPECIAL.get(node.target._schema.name)
    if special is not None:
        special(node)
        return
    full = f"{node.target._schema.name}.{node.target._schema.overload_name}".removesuffix(".")
    function = _ARITHMETIC.get(full)
    if function is None and full not in _OWN_NAME:
        function = _SAME.get(node.target._schema.name)
    if function is not None:
        node.kwargs = _told(node.kwargs)
        node.target = function


def follow_training(node: fx.Node, training: fx.Node) -> None:
    """Let what was fixed as being in training be so only if ``training``, a node that is True or False, says so.

    What was off in training (a part of the model that is frozen in evaluation mode) stays off. Call it before `to_python`.
    """
    if not isinstance(node.target, OpOverload):
        return
    names = [declared.name for declared in node.target._schema.arguments]
    for name in _FLAGS:
        # Statistics that are not kept are those of the batch in evaluation too.
        without = "running_mean" in names and argument(node, "running_mean") is None
        if name in names and argument(node, name) is True and not without:
            _set(node, name, names.index(name), training)
    if operator_name(node) == "scaled_dot_product_attention" and argument(node, "dropout_p"):
        with node.graph.inserting_before(node):
            rate = node.graph.call_function(operator.mul, (argument(node, "dropout_p"), training))  # p or 0
        _set(node, "dropout_p", names.index("dropout_p"), rate)


def _set(node: fx.Node, name: str, position: int, value: fx.Node) -> None:
    if position < len(node.args):
        node.update_arg(position, value)
    else:
        node.update_kwarg(name, value)


def _call(node: fx.Node, function: Function, names: tuple[str, ...], **options: Any) -> None:
    node.args, node.kwargs = tuple(argument(node, name) for name in names), options
    node.target = function


def _batch_norm(node: fx.Node) -> None:
    names = ("input", "running_mean", "running_var", "weight", "bias", "training", "momentum", "eps")
    _call(node, F.batch_norm, names)


def _in_place(function: Function) -> Callable[[fx.Node], None]:
    return lambda node: _call(node, function, ("self", "p", "train"), inplace=True)


def _embedding(node: fx.Node) -> None:
    padding = argument(node, "padding_idx")
    options = {name: True for name in ("scale_grad_by_freq", "sparse") if argument(node, name)}
    _call(node, F.embedding, ("indices", "weight"), padding_idx=None if padding == -1 else padding, **options)


def _group_norm(node: fx.Node) -> None:
    _call(node, F.group_norm, ("input", "num_groups", "weight", "bias", "eps"))


def _layer_norm(node: fx.Node) -> None:
    _call(node, F.layer_norm, ("input", "normalized_shape", "weight", "bias", "eps"))


_SPECIAL: Final[Mapping[str, Callable[[fx.Node], None]]] = {
    "aten::alpha_dropout_": _in_place(F.alpha_dropout),
    "aten::batch_norm": _batch_norm,
    "aten::dropout_": _in_place(F.dropout),
    "aten::embedding": _embedding,
    "aten::feature_dropout_": _in_place(F.dropout3d),  # that of any number of dims
    "aten::group_norm": _group_norm,
    "aten::layer_norm": _layer_norm,
}


def _told(options: Mapping[str, Any]) -> dict[str, Any]:
    """Without what is left open or has no meaning for a tensor that is made on a device."""
    return {
        name: value for name, value in options.items() if value is not None and name not in ("pin_memory", "layout")
    }

"""From traced nodes to the ops of the ModelGraph."""

from __future__ import annotations

import operator
from collections.abc import Callable

import torch
from torch import Tensor, fx

from heterodyne.frontend.arguments import argument, mutates, operator_name
from heterodyne.frontend.export import Traced, tensors_of
from heterodyne.frontend.faults import line_of
from heterodyne.frontend.flops import flops
from heterodyne.frontend.replay import Observed
from heterodyne.frontend.sizes import spec_of
from heterodyne.graph import Op, Size, TensorSpec
from heterodyne.graph.size import ZERO

__all__ = ["batch_statistics", "describe", "differentiable", "producer_of", "random_ops"]

# Of a table these read no more than the rows that they return.
_LOOKUPS = frozenset({"embedding", "gather", "index", "index_select"})
_ANNOTATION = "heterodyne"


def describe(traced: Traced, observed: dict[fx.Node, Observed]) -> tuple[Op, ...]:
    """One Op for each node that computes tensors, in order."""
    return tuple(
        _op(traced, node, observed[node], lambda n: differentiable(traced, observed, n)) for node in traced.ops
    )


def differentiable(traced: Traced, observed: dict[fx.Node, Observed], node: fx.Node) -> bool:
    """Whether gradients flow into what a node returns (one output of several, where it picks one)."""
    role = traced.roles.get(node)
    if role is not None:
        return role.kind == "parameter" and traced.model.get_parameter(role.name).requires_grad
    return node in observed and any(observed[node].differentiable)


def _op(traced: Traced, node: fx.Node, seen: Observed, differentiable: Callable[[fx.Node], bool]) -> Op:
    forward, backward = flops(node, differentiable)
    outputs = tuple(spec_of(tensor) for tensor in tensors_of(node))
    read, written = _traffic(node, outputs, seen)
    roles = [(source, traced.roles.get(source)) for source in dict.fromkeys(map(producer_of, node.all_input_nodes))]
    return Op(
        name=node.name,
        target=str(node.target),
        inputs=tuple(
            role.name if role else source.name
            for source, role in roles
            if (role.kind == "input" if role else bool(tensors_of(source)))
        ),
        parameters=tuple(
            dict.fromkeys(r.name for _, r in roles if r is not None and r.kind in ("parameter", "buffer"))
        ),
        outputs=outputs,
        differentiable=seen.differentiable,
        module=traced.module_of(node),
        source=line_of(node),
        flops_forward=forward,
        flops_backward=backward,
        bytes_read=read,
        bytes_written=written,
        bytes_saved=seen.saved,
        annotation=_annotation(node),
    )


def producer_of(node: fx.Node) -> fx.Node:
    """The op that made a tensor: through the choice of one of several outputs."""
    while node.target is operator.getitem and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    return node


def random_ops(traced: Traced) -> tuple[str, ...]:
    """Names of the ops that draw random numbers; not of dropout that is switched off."""
    return tuple(node.name for node in traced.ops if _draws(node))


def batch_statistics(traced: Traced) -> tuple[str, ...]:
    """Names of the ops that normalise over the micro-batch."""
    return tuple(
        node.name
        for node in traced.ops
        if "batch_norm" in operator_name(node) and (argument(node, "training") or argument(node, "use_input_stats"))
    )


def _draws(node: fx.Node) -> bool:
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or torch.Tag.nondeterministic_seeded not in target.tags:
        # Fused attention is tagged below its public name.
        return operator_name(node) == "scaled_dot_product_attention" and argument(node, "dropout_p") not in (
            None,
            0,
            0.0,
        )
    if argument(node, "train") is False or argument(node, "training") is False:
        return False
    return all(argument(node, name) not in (0, 0.0) for name in ("p", "dropout_p", "dropout"))


def _traffic(node: fx.Node, outputs: tuple[TensorSpec, ...], seen: Observed) -> tuple[Size, Size]:
    """Bytes read and written: none for a view, only the rows that are taken for a lookup."""
    if all(seen.views) and not mutates(node):
        return ZERO, ZERO
    written = Size.total(spec.bytes for spec in outputs)
    sources = [n.meta["val"] for n in node.all_input_nodes if isinstance(n.meta.get("val"), Tensor)]
    if operator_name(node) in _LOOKUPS:
        sources = [tensor for tensor in sources if not tensor.is_floating_point()]
        return written + Size.total(spec_of(tensor).bytes for tensor in sources), written
    return Size.total(spec_of(tensor).bytes for tensor in sources), written


def _annotation(node: fx.Node) -> str | None:
    value = (node.meta.get("custom") or {}).get(_ANNOTATION)
    return None if value is None else str(value)

"""From traced nodes to the ops of the ModelGraph."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, fx

from heterodyne.frontend.arguments import argument, mutates, operator_name
from heterodyne.frontend.export import Traced
from heterodyne.frontend.faults import line_of
from heterodyne.frontend.flat_graph import tensors_of
from heterodyne.frontend.flops import flops
from heterodyne.frontend.replay import Observed
from heterodyne.frontend.sizes import size_of, spec_of
from heterodyne.graph import Argument, Op, Ref, Size, TensorSpec
from heterodyne.graph.size import ZERO

__all__ = ["describe", "differentiable", "producer_of", "random_ops", "ref_of"]

# Of a table these read no more than the rows that they return.
_LOOKUPS = frozenset({"embedding", "gather", "index", "index_select"})


def describe(
    traced: Traced,
    observed: dict[fx.Node, Observed],
    memory: Mapping[fx.Node, str],
    sample_dims: Mapping[fx.Node, int | None],
) -> tuple[Op, ...]:
    """One Op for each node that computes tensors, in order.

    Args:
        memory: which one a node is in, if it is written into.
        sample_dims: of tensors in which the samples are in order.
    """
    return tuple(
        _op(traced, node, observed[node], lambda n: differentiable(traced, observed, n), memory, sample_dims)
        for node in traced.ops
    )


def differentiable(traced: Traced, observed: dict[fx.Node, Observed], node: fx.Node) -> bool:
    """Return whether gradients flow into what a node returns (one output of several, where it picks one)."""
    role = traced.roles.get(node)
    if role is not None:
        return role.kind == "parameter" and traced.model.get_parameter(role.name).requires_grad
    return node in observed and any(observed[node].differentiable)


def _op(
    traced: Traced,
    node: fx.Node,
    seen: Observed,
    differentiable: Callable[[fx.Node], bool],
    memory: Mapping[fx.Node, str],
    sample_dims: Mapping[fx.Node, int | None],
) -> Op:
    forward, backward = flops(node, differentiable)
    outputs = tuple(spec_of(tensor) for tensor in tensors_of(node))
    read, written = _traffic(node, outputs, seen)
    of_outputs = _memory_of_outputs(node, memory)
    roles = [(source, traced.roles.get(source)) for source in dict.fromkeys(map(producer_of, node.all_input_nodes))]
    return Op(
        name=node.name,
        target=str(node.target),
        inputs=tuple(
            role.symbol if role else source.name
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
        annotation=traced.annotations.names.get(node),
        arguments=_arguments(traced, node),
        memory=memory.get(node) or next(iter(of_outputs.values()), None),
        in_memory=tuple(of_outputs),
        writes=tuple(dict.fromkeys(memory[changed] for changed in mutates(node))),
        samples=_sample_dims(node, len(outputs), sample_dims),
    )


def _memory_of_outputs(node: fx.Node, memory: Mapping[fx.Node, str]) -> dict[int, str]:
    """Return, of an op of several outputs, those that are written into, with what their memory is called."""
    picked = [user for user in node.users if user.target is operator.getitem and user in memory]
    return {place: memory[user] for user in picked if isinstance(place := user.args[1], int)}


def _sample_dims(node: fx.Node, outputs: int, dims: Mapping[fx.Node, int | None]) -> tuple[int | None, ...]:
    if isinstance(node.meta.get("val"), Tensor):
        return (dims.get(node),)
    of_output = {_place(user): dims.get(user) for user in node.users if user.target is operator.getitem}
    return tuple(of_output.get(place) for place in range(outputs))


def _arguments(traced: Traced, node: fx.Node) -> tuple[tuple[str, Argument], ...]:
    if not isinstance(node.target, torch._ops.OpOverload):
        return tuple((str(place), _argument(traced, value)) for place, value in enumerate(node.args))
    declared = node.target._schema.arguments
    return tuple((entry.name, _argument(traced, argument(node, entry.name))) for entry in declared)


def _argument(traced: Traced, value: Any) -> Argument:
    if isinstance(value, fx.Node):
        return _tensor_or_size(traced, value)
    if isinstance(value, list | tuple):
        return tuple(_argument(traced, entry) for entry in value)
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return str(value).removeprefix("torch.")


def _tensor_or_size(traced: Traced, node: fx.Node) -> Argument:
    producer = producer_of(node)
    tensors = tensors_of(node)
    if not tensors:
        known = node.meta.get("val")
        return size_of(known) if isinstance(known, int | torch.SymInt) else str(node.target)
    role = traced.roles.get(producer)
    name = role.symbol if role is not None else producer.name
    if node is not producer:
        return ref_of(node)
    return Ref(name) if isinstance(node.meta["val"], Tensor) else tuple(Ref(name, i) for i in range(len(tensors)))


def ref_of(node: fx.Node) -> Ref:
    """Return what an op, or one output of several, is called in the ModelGraph."""
    producer = producer_of(node)
    return Ref(producer.name, 0 if node is producer else _place(node))


def _place(node: fx.Node) -> int:
    """Return which of the outputs of its op a node is."""
    place = node.args[1]
    assert isinstance(place, int)
    return place


def producer_of(node: fx.Node) -> fx.Node:
    """The op that made a tensor: through the choice of one of several outputs."""
    while node.target is operator.getitem and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    return node


def random_ops(traced: Traced) -> tuple[str, ...]:
    """Names of the ops that draw random numbers; not of dropout that is switched off."""
    return tuple(node.name for node in traced.ops if _draws(node))


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

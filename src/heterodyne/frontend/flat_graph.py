"""The nodes of an exported graph, and its sub-graphs for torch.no_grad and autocast laid flat."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

__all__ = ["Region", "drop_bookkeeping", "inline_one", "is_op", "region_of", "tensors_of"]


_REGION = "heterodyne_region"


@dataclass(frozen=True, slots=True)
class Region:
    """What encloses an op: whether gradients flow, and the autocast (device type, dtype, enabled, cache) if there is one."""

    grad: bool = True
    autocast: tuple[str, torch.dtype, bool, bool | None] | None = None


def is_op(node: fx.Node) -> bool:
    """Return whether a node computes tensors: not the arithmetic of sizes, nor taking one tensor out of several."""
    return node.op == "call_function" and node.target is not operator.getitem and bool(tensors_of(node))


def tensors_of(node: fx.Node) -> tuple[Tensor, ...]:
    """The tensors that a node returns, without data."""
    value = node.meta.get("val")
    if isinstance(value, Tensor):
        return (value,)
    return tuple(v for v in value if isinstance(v, Tensor)) if isinstance(value, tuple | list) else ()


def region_of(node: fx.Node) -> Region:
    """Return what encloses the node."""
    region: Region = node.meta.get(_REGION, Region())
    return region


def inline_one(graph: fx.Graph, root: nn.Module) -> bool:
    """Lay the first sub-graph of torch.no_grad or autocast flat; False if there is none left."""
    for node in graph.find_nodes(op="call_function", target=torch.ops.higher_order.wrap_with_set_grad_enabled):
        enabled, body, *operands = node.args
        _inline(graph, root, node, body, operands, Region(bool(enabled), region_of(node).autocast))
        return True
    for node in graph.find_nodes(op="call_function", target=torch.ops.higher_order.wrap_with_autocast):
        device, dtype, enabled, cache, body, *operands = node.args
        _inline(graph, root, node, body, operands, Region(region_of(node).grad, (device, dtype, enabled, cache)))
        return True
    return False


def _inline(graph: fx.Graph, root: nn.Module, node: fx.Node, body: Any, operands: list[Any], region: Region) -> None:
    inner: fx.GraphModule = root.get_submodule(body.target)  # type: ignore[assignment]  # torch.export puts graphs there
    values: dict[fx.Node, Any] = dict(zip(inner.graph.find_nodes(op="placeholder"), operands, strict=True))
    with graph.inserting_before(node):
        for source in inner.graph.nodes:
            if source.op in ("placeholder", "output"):
                continue
            copied = graph.node_copy(source, lambda n: values[n])
            copied.meta = {**source.meta, _REGION: region}
            if source.op == "get_attr":
                copied.target = f"{body.target}.{source.target}"
            values[source] = copied
    (results,) = inner.graph.output_node().args
    for user in list(node.users):
        assert user.target is operator.getitem, "a sub-graph returns a tuple"
        result: Any = results[user.args[1]]  # type: ignore[index]  # a tuple, by the line above
        user.replace_all_uses_with(values[result])
        graph.erase_node(user)
    graph.erase_node(node)
    if not body.users:
        graph.erase_node(body)


def drop_bookkeeping(graph: fx.Graph) -> None:
    """Erase assertions, and the sizes that only they read."""
    for node in reversed(list(graph.nodes)):
        if node.users or node.op not in ("call_function", "get_attr"):
            continue
        if node.op == "get_attr" or not tensors_of(node):
            graph.erase_node(node)

"""Operators, their arguments by name, and what leads to what."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import fx
from torch._ops import OpOverload

__all__ = ["argument", "leading_to", "mutates", "operator_name"]


def operator_name(node: fx.Node) -> str:
    """``linear`` for ``aten.linear.default``; the target's own text for what is not an operator."""
    target = node.target
    return target._schema.name.partition("::")[2] if isinstance(target, OpOverload) else str(target)


def argument(node: fx.Node, name: str) -> Any:
    """The value of an argument, given or by default; None if the operator has none of that name."""
    if not isinstance(node.target, OpOverload):
        return None
    for position, declared in enumerate(node.target._schema.arguments):
        if declared.name == name:
            if position < len(node.args):
                return node.args[position]
            return node.kwargs.get(name, declared.default_value)
    return None


def mutates(node: fx.Node) -> list[fx.Node]:
    """The nodes whose tensors an op changes in place."""
    if not isinstance(node.target, OpOverload) or not node.target._schema.is_mutable:
        return []
    changed = [d.name for d in node.target._schema.arguments if d.alias_info is not None and d.alias_info.is_write]
    return [value for value in (argument(node, name) for name in changed) if isinstance(value, fx.Node)]


def leading_to(targets: Iterable[fx.Node]) -> list[fx.Node]:
    """The nodes that results need, in order; with what changes a tensor in place on the way."""
    needed = set(targets)
    if not needed:
        return []
    order = list(next(iter(needed)).graph.nodes)
    while True:
        found = set(needed)
        for node in reversed(order):
            if node in found:
                found.update(node.all_input_nodes)
            elif node.op == "call_function" and found.intersection(mutates(node)):
                found.update((node, *node.all_input_nodes))
        if found == needed:
            return [node for node in order if node in needed]
        needed = found

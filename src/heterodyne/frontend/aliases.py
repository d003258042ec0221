"""Which tensors of a graph may share memory, and which ops write into it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx
from torch._ops import OpOverload

from heterodyne.frontend.arguments import argument, mutates, operator_name
from heterodyne.frontend.describe import producer_of
from heterodyne.frontend.flat_graph import tensors_of
from heterodyne.frontend.replay import Observed

__all__ = ["Aliases", "shared_memory"]


@dataclass(frozen=True, kw_only=True)
class Aliases:
    """Groups of tensors that may share memory, each known by one of them.

    Groups are rather too large than too small: what copies only sometimes (``reshape``, ``contiguous``) counts as sharing.

    Args:
        group_of: the group of each node that returns tensors, and of each placeholder.
        writers: for each group that is written into after it was made, the ops that do so, in order.
    """

    group_of: Mapping[fx.Node, fx.Node]
    writers: Mapping[fx.Node, tuple[fx.Node, ...]]

    def writers_of(self, node: fx.Node) -> tuple[fx.Node, ...]:
        """The ops that may change what a node returned."""
        group = self.group_of.get(node)
        return () if group is None else self.writers.get(group, ())


def shared_memory(graph: fx.Graph, observed: Mapping[fx.Node, Observed]) -> Aliases:
    """Find the groups from what operators declare, and from what was seen of those that declare nothing."""
    parent: dict[fx.Node, fx.Node] = {}

    def find(node: fx.Node) -> fx.Node:
        while parent.setdefault(node, node) is not node:
            node = parent[node]
        return node

    for node in graph.nodes:
        if node.op == "placeholder" or tensors_of(node):
            find(node)
            for source in _shared_with(node, observed):
                parent[find(node)] = find(source)
    writers: dict[fx.Node, list[fx.Node]] = {}
    for node in graph.nodes:
        for group in {find(changed): None for changed in mutates(node)}:
            writers.setdefault(group, []).append(node)
    return Aliases(
        group_of={node: find(node) for node in list(parent)},
        writers={group: tuple(nodes) for group, nodes in writers.items()},
    )


def _shared_with(node: fx.Node, observed: Mapping[fx.Node, Observed]) -> list[fx.Node]:
    """The tensors that a node reads and whose memory it may return."""
    producer = producer_of(node)
    declared = _declared(producer)
    if producer is not node:
        return [producer] if declared or _seen(producer, observed) else []
    if declared:
        return declared
    return [n for n in node.all_input_nodes if tensors_of(n)] if _seen(node, observed) else []


def _seen(node: fx.Node, observed: Mapping[fx.Node, Observed]) -> bool:
    return node in observed and any(observed[node].views)


def _declared(node: fx.Node) -> list[fx.Node]:
    if not isinstance(node.target, OpOverload):
        return []
    schema = node.target._schema
    returned = {name for result in schema.returns if result.alias_info for name in result.alias_info.before_set}
    sources: list[fx.Node] = []
    for declared in schema.arguments:
        # "*": a list of views is returned, which the schema cannot tell apart.
        if declared.alias_info and (
            returned & set(declared.alias_info.before_set) or "*" in declared.alias_info.after_set
        ):
            sources += [n for n in _nodes(argument(node, declared.name)) if not _converted(node, n)]
    return sources


def _converted(node: fx.Node, source: fx.Node) -> bool:
    """Return whether ``to`` made another dtype, which takes memory of its own."""
    made, given = node.meta.get("val"), source.meta.get("val")
    if operator_name(node) != "to" or not isinstance(made, Tensor) or not isinstance(given, Tensor):
        return False
    return made.dtype is not given.dtype


def _nodes(value: Any) -> list[fx.Node]:
    values = value if isinstance(value, list | tuple) else (value,)
    return [v for v in values if isinstance(v, fx.Node)]

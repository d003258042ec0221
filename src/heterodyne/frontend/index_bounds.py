"""How large an integer input may be: below the size of what it indexes, found by following the graph to where it is used."""

from __future__ import annotations

from collections.abc import Collection

from torch import fx

from heterodyne.frontend.arguments import argument, operator_name
from heterodyne.frontend.numbered_rows import numbered_rows
from heterodyne.frontend.sizes import size_of
from heterodyne.graph import Size
from heterodyne.graph.op_kinds import JOINS, LABELLED_LOSSES, SAME_VALUES, SLICES

__all__ = ["index_bounds"]

# Not those of `LIKE`: whose values they pass on depends on the place of the tensor.
_PASSES_ON = SAME_VALUES | SLICES | JOINS | {"getitem", "masked_fill", "pad", "repeat", "roll", "where"}


def index_bounds(node: fx.Node, within: Collection[fx.Node]) -> tuple[Size, ...]:
    """The sizes that bound a node's values, from its uses ``within`` some ops; none if nothing indexes by it."""
    bounds: list[Size] = []
    seen = {node}
    waiting = [node]
    while waiting:
        value = waiting.pop()
        for user in value.users:
            if user in seen:
                continue
            if user in within:
                bound = _bound(user, value)
                if bound is not None:
                    bounds.append(bound)
            if operator_name(user) in _PASSES_ON or "getitem" in operator_name(user):
                seen.add(user)
                waiting.append(user)
    return tuple(bounds)


def _bound(user: fx.Node, value: fx.Node) -> Size | None:
    name = operator_name(user)
    for numbered in numbered_rows(user):
        if numbered.index is value and numbered.source is not value and numbered.dim is not None:
            return _size(numbered.source, numbered.dim)
    if name in LABELLED_LOSSES and argument(user, "target") is value:
        logits = argument(user, "self")
        return _size(logits, min(1, logits.meta["val"].dim() - 1))
    if name == "experts" and argument(user, "indices") is value:
        return _size(argument(user, "gate_up"), 0)
    if name == "one_hot" and argument(user, "num_classes") > 0:
        return Size.of(argument(user, "num_classes"))
    return None


def _size(node: fx.Node, dim: int) -> Size:
    return size_of(node.meta["val"].shape[dim])

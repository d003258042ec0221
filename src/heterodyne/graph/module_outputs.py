"""Ops that show tensors to the script (``heterodyne::module_output``), and the graph as it is without them.

How tensors are laid out on devices must not depend on whether somebody looks, since weights stay on their devices. So layouts are worked
out for the graph without these ops, and each of them leaves its tensor as it was.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Final

from heterodyne.graph.ir import ModelGraph
from heterodyne.graph.op import Argument, Op, Ref

__all__ = ["MODULE_OUTPUT", "Plain", "without_module_outputs"]

MODULE_OUTPUT: Final = "module_output"
"""The kind of these ops."""


@dataclass(frozen=True, kw_only=True)
class Plain:
    """A graph without these ops. ``shown``: by the name of each of them the tensor that it shows; ``before``: for each place in the ops of
    the graph with them, and for its end, that in the ops without."""

    graph: ModelGraph
    shown: Mapping[str, Ref]
    before: tuple[int, ...]


@lru_cache(maxsize=64)
def without_module_outputs(graph: ModelGraph) -> Plain:
    """Return the graph as it was captured without hooks."""
    shown: dict[str, Ref] = {}
    ops: list[Op] = []
    before: list[int] = []
    for op in graph.ops:
        before.append(len(ops))
        if op.kind == MODULE_OUTPUT:
            (source,) = op.operands
            shown[op.name] = shown.get(source.name, source)
        else:
            ops.append(op)
    before.append(len(ops))
    if not shown:
        return Plain(graph=graph, shown=shown, before=tuple(before))
    written = {shown[memory].name for op in ops for memory in op.writes if memory in shown}
    plain = replace(
        graph,
        ops=tuple(_as_reading(op, shown, graph, written) for op in ops),
        blocks=tuple(replace(b, start=before[b.start], stop=before[b.stop]) for b in graph.blocks),
        output=None if graph.output is None else shown.get(graph.output.name, graph.output),
    )
    return Plain(graph=plain, shown=shown, before=tuple(before))


def _as_reading(op: Op, shown: Mapping[str, Ref], graph: ModelGraph, written: set[str]) -> Op:
    """The op with what is shown in the place of what shows it."""
    read = [shown[name].name if name in shown else name for name in op.inputs]
    memory = shown[op.memory].name if op.memory is not None and op.memory in shown else op.memory
    return replace(
        op,
        inputs=tuple(dict.fromkeys(name for name in read if name not in graph.given)),
        parameters=tuple(dict.fromkeys((*op.parameters, *(name for name in read if name in graph.stored)))),
        arguments=tuple((name, _of(value, shown)) for name, value in op.arguments),
        memory=op.name if memory is None and op.name in written else memory,
        writes=tuple(shown[name].name if name in shown else name for name in op.writes),
    )


def _of(value: Argument, shown: Mapping[str, Ref]) -> Argument:
    if isinstance(value, tuple):
        return tuple(_of(entry, shown) for entry in value)
    found: Any = shown.get(value.name, value) if isinstance(value, Ref) else value
    return found  # type: ignore[no-any-return]

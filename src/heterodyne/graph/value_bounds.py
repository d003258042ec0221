"""Between which values an input of integers must be, because something is looked up by it.

A token is a row of an embedding, a label one of the classes. Found by walking back from what looks up to an input, through ops that
hand values on as they are: views, slices, casts between integers. What is computed on the way (``tokens + 1``) has no bound here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from heterodyne.graph.ir import Input, ModelGraph, Op, Ref
from heterodyne.graph.op_kinds import LABELLED_LOSSES, LIKE, SAME_VALUES, SLICES

__all__ = ["Taken", "ValueBound", "value_bounds"]

_INTEGERS = frozenset({"int8", "uint8", "int16", "int32", "int64"})
_WIDE = frozenset({"int32", "int64"})
_WHOLE = SAME_VALUES | LIKE | {"repeat"}
_TAKES = SLICES | {"pad"}  # padding adds values


@dataclass(frozen=True, kw_only=True)
class Taken:
    """An op on the way from an input to what looks up, and which of its outputs goes on."""

    op: Op
    output: int


@dataclass(frozen=True, kw_only=True)
class ValueBound:
    """Values of an input must be ``0 <= value < size``, or ``ignore``.

    Args:
        field: the input.
        what: it chooses rows of an embedding, classes of a loss, or entries of a tensor.
        source: "file.py:12" of the user's line, "" where unknown.
        taken: what is done with the input before; empty if all of its values are looked up.
        fixed: ``size`` does not change with the sizes of the inputs, such as the length of a sequence.
    """

    field: str
    what: Literal["rows", "classes", "entries"]
    size: int
    ignore: int | None = None
    source: str = ""
    taken: tuple[Taken, ...] = ()
    fixed: bool = True


def value_bounds(graph: ModelGraph) -> tuple[ValueBound, ...]:
    """The bounds of all inputs of integers; none for a model without a graph."""
    written = {memory for op in graph.ops for memory in op.writes}
    found: dict[tuple[object, ...], ValueBound] = {}
    for op in graph.ops:
        for ref, what, size, ignore, fixed in _looked_up(graph, op):
            for entry, path in _origins(graph, ref):
                if entry.symbol in written or entry.spec.dtype not in _INTEGERS:
                    continue
                field = entry.name
                last = max((place for place, step in enumerate(path) if step.op.kind in _TAKES), default=-1)
                bound = ValueBound(
                    field=field,
                    what=what,
                    size=size,
                    ignore=ignore,
                    source=op.source,
                    taken=path[: last + 1],
                    fixed=fixed,
                )
                found.setdefault((field, what, size, ignore, bound.taken), bound)
    return tuple(found.values())


_Lookup = tuple[Ref, Literal["rows", "classes", "entries"], int, int | None, bool]


def _looked_up(graph: ModelGraph, op: Op) -> Iterator[_Lookup]:
    """Yield what an op looks up by: the indices, in what, of which size, what is left out, and whether that size is fixed."""
    if op.kind == "embedding":
        table, indices = op.argument("weight"), op.argument("indices")
        if isinstance(table, Ref) and isinstance(indices, Ref) and table.name in graph.stored:
            yield indices, "rows", graph.stored[table.name].shape[0], None, True
    elif op.kind in LABELLED_LOSSES:
        logits, target, ignore = op.argument("self"), op.argument("target"), op.argument("ignore_index")
        if isinstance(logits, Ref) and isinstance(target, Ref) and isinstance(ignore, int):
            shape = graph.spec(logits).shape
            classes = shape[min(1, len(shape) - 1)]
            if classes.is_constant:
                yield target, "classes", int(classes(1)), ignore, _is_fixed(graph, int(classes(1)))
    elif op.kind in ("gather", "index_select"):
        table, index, dim = op.argument("self"), op.argument("index"), op.argument("dim")
        if isinstance(table, Ref) and isinstance(index, Ref) and isinstance(dim, int) and table.name in graph.stored:
            yield index, "entries", graph.stored[table.name].shape[dim], None, True


def _is_fixed(graph: ModelGraph, size: int) -> bool:
    """Return whether a size is that of a weight, and of no input: those may have other sizes later."""
    of_inputs = {dim(1) for entry in graph.inputs for dim in entry.spec.shape if dim.is_constant}
    return size not in of_inputs and any(size in parameter.shape for parameter in graph.parameters)


def _origins(graph: ModelGraph, ref: Ref) -> Iterator[tuple[Input, tuple[Taken, ...]]]:
    """The input that the values of a tensor come from, and the ops on the way; nothing if they are computed."""
    path: list[Taken] = []
    while (op := graph.op_by_name.get(ref.name)) is not None:
        source = op.argument("self")
        passes = op.kind in _WHOLE or op.kind in _TAKES
        if not passes or not isinstance(source, Ref) or op.memory is not None:
            return
        before, after = graph.spec(source).dtype, graph.spec(ref).dtype
        if after != before and after not in _WIDE:  # a bool, a float, or too narrow for the value
            return
        path.insert(0, Taken(op=op, output=ref.output))
        ref = source
    for entry in graph.inputs:
        if entry.symbol == ref.name:
            yield entry, tuple(path)

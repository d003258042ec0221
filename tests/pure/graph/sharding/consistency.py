"""What must be true of how a stage lies on its devices, whatever is chosen: all is read as it was made, or converted first."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from heterodyne.graph import ModelGraph, Op, Ref
from heterodyne.graph.sharding import COPY, PARTIAL, REPLICATE, Layout, Sharding, conversion

_GRADIENT = {COPY: PARTIAL, PARTIAL: COPY}


def gradient_of(layout: Layout) -> Layout:
    """How the gradient of a tensor lies."""
    return _GRADIENT.get(layout, layout)


def inconsistencies(sharding: Sharding, graph: ModelGraph, ops: Sequence[Op]) -> list[str]:
    """All of them, along all axes. ``ops``: of the stage, in order."""
    return [
        found
        for axis in sharding.axes
        for found in (*_made(axis, graph, ops), *_read(axis, graph, ops), *_back(axis, graph))
    ]


def _made(axis: Sharding, graph: ModelGraph, ops: Sequence[Op]) -> Iterator[str]:
    """Each tensor lies as what makes it says."""
    for op in ops:
        for place, layout in enumerate(axis.strategies[op.name].outputs):
            known = axis.layouts[Ref(op.name, place)]
            if known != layout:
                yield f"{op.name} makes its output {place} as {layout}, and it is taken for {known}"
    for ref in [Ref(entry.symbol) for entry in graph.inputs] + [Ref(entry.name) for entry in graph.constants]:
        if axis.layouts.get(ref, REPLICATE) != REPLICATE:
            yield f"{ref.name}, which each device has, is taken for {axis.layouts[ref]}"


def _read(axis: Sharding, graph: ModelGraph, ops: Sequence[Op]) -> Iterator[str]:
    """Each op reads each tensor as it was made, or a conversion of it as it is since it was last written into."""
    ahead: dict[str | None, list[tuple[Ref, Layout]]] = {}
    for exchange in axis.exchanges:
        ahead.setdefault(exchange.before, []).append((exchange.tensor, exchange.want))
        if exchange.have != axis.layouts[exchange.tensor]:
            yield f"{exchange.tensor} is converted from {exchange.have}, and lies as {axis.layouts[exchange.tensor]}"
    there: set[tuple[Ref, Layout]] = set()
    for op in ops:
        there.update(ahead.get(op.name, ()))
        for ref, want in zip(op.operands, axis.strategies[op.name].operands, strict=True):
            if axis.layouts[ref] != want and (ref, want) not in there:
                yield f"{op.name} reads {ref} as {want}, and it lies as {axis.layouts[ref]}"
        there = {(ref, want) for ref, want in there if graph.memory_of(ref) not in op.writes}
    there.update(ahead.get(None, ()))
    for ref, want in axis.wanted.items():
        if axis.layouts[ref] != want and (ref, want) not in there:
            yield f"{ref} is wanted as {want}, and lies as {axis.layouts[ref]}"


def _back(axis: Sharding, graph: ModelGraph) -> Iterator[str]:
    """The gradient comes back from how that of what was wanted lies to how that of what there was does."""
    for exchange in axis.exchanges:
        back = conversion(gradient_of(exchange.want), gradient_of(exchange.have)).forward
        if exchange.steps.backward != (back if graph.flows(exchange.tensor) else None):
            yield f"the gradient of {exchange.tensor} comes back by {exchange.steps.backward}, not {back}"

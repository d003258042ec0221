"""What a graph tells of the shape of a transformer: its layers, its widths."""

from __future__ import annotations

import re
from collections import Counter

from heterodyne.errors import PlanError
from heterodyne.graph import Block, ModelGraph, Op
from heterodyne.graph.ir import Ref
from heterodyne.plan.export.even_plan import ModelShape

__all__ = ["layer_blocks", "model_shape"]


def layer_blocks(graph: ModelGraph) -> tuple[Block, ...]:
    """The layers: from the first to the last block that is called like those of the kind that is there most often.

    A layer of another kind is one too, as the dense ones before those with experts. Raises PlanError if no kind repeats.
    """
    kind, count = Counter(block.kind for block in graph.blocks).most_common(1)[0]
    if count < 2:
        raise PlanError(f"model {graph.name} has no repeated layers, which other frameworks count")
    called = {_unnumbered(block.name) for block in graph.blocks if block.kind == kind}
    places = [block.index for block in graph.blocks if _unnumbered(block.name) in called]
    return graph.blocks[places[0] : places[-1] + 1]


def _unnumbered(name: str) -> str:
    return re.sub(r"[0-9]+", "#", name)


def model_shape(graph: ModelGraph) -> ModelShape:
    """What can be read off the ops; what cannot is None."""
    table = next((op.argument("weight") for op in graph.ops if op.kind == "embedding"), None)
    lookup = graph.stored.get(table.name) if isinstance(table, Ref) else None
    attention = next((op for op in graph.ops if op.kind == "scaled_dot_product_attention"), None)
    heads, groups = (_heads(graph, attention, operand) for operand in ("query", "key"))
    return ModelShape(
        hidden_size=lookup.shape[1] if lookup is not None else None,
        num_attention_heads=heads,
        num_query_groups=groups if groups != heads else None,  # many models repeat the keys before they attend
        sequence_length=_positions(graph, attention),
    )


def _heads(graph: ModelGraph, attention: Op | None, operand: str) -> int | None:
    """Attention is [batch, heads, positions, width of a head]."""
    return _dim(graph, attention, operand, -3)


def _positions(graph: ModelGraph, attention: Op | None) -> int | None:
    return _dim(graph, attention, "query", -2)


def _dim(graph: ModelGraph, op: Op | None, operand: str, dim: int) -> int | None:
    value = op.argument(operand) if op is not None else None
    if not isinstance(value, Ref):
        return None
    shape = graph.spec(value).shape
    if len(shape) < 4 or not shape[dim].is_constant:
        return None
    return int(shape[dim](1))

"""The row of a table of layer costs of a block of a captured model: bytes are those of the graph, whoever tells the seconds."""

from __future__ import annotations

from heterodyne.cost.layers import LayerCost
from heterodyne.cost.recipe import Recipe
from heterodyne.graph.ir import Block, ModelGraph

__all__ = ["block_cost"]


def block_cost(
    graph: ModelGraph, block: Block, size: int, recipe: Recipe, *, forward_s: float, backward_s: float, update_s: float
) -> LayerCost:
    """Of one device that has the whole block, for micro-batches of ``size`` samples."""
    ops, held = graph.ops_of(block), graph.parameters_of(block)
    trained = sum(p.bytes for p in held if p.trainable)
    scale = 0.5 if recipe.precision == "bf16" else 1.0  # activations under autocast
    output = scale * max((int(spec.bytes(size)) for spec in ops[-1].outputs), default=0)
    return LayerCost(
        forward_s=forward_s,
        backward_s=backward_s,
        update_s=update_s,
        parameter_bytes=sum(p.bytes for p in held),
        gradient_bytes=trained,
        optimizer_bytes=recipe.states * trained,
        kept_bytes=round(scale * sum(op.bytes_saved(size) for op in ops)),
        kept_bytes_recomputed=round(output),  # blocks that are alike read what they make
        output_bytes=0 if block.stop == len(graph.ops) else round(output),
        workspace_bytes=max((int(spec.bytes(size)) for op in ops for spec in op.outputs), default=0),
    )

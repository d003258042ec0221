"""The `LayerCost` of a block of a captured model: bytes from the graph, seconds from the caller."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil, prod

from heterodyne.cost.exchange import buffer_bytes
from heterodyne.cost.layers import LayerCost
from heterodyne.cost.op_shares import StageShares
from heterodyne.cost.recipe import Recipe
from heterodyne.cost.stage_collectives import StageCollective, conversion, exchanges_of, within
from heterodyne.graph.ir import Block, ModelGraph, Op, Parameter, Ref
from heterodyne.plan.boxes import Slice, numel

__all__ = ["block_cost", "meetings_of", "trained_bytes", "typical_blocks"]


def block_cost(
    graph: ModelGraph,
    block: Block,
    size: int,
    recipe: Recipe,
    *,
    forward_s: float,
    backward_s: float,
    update_s: float,
    parts: StageShares | None = None,
) -> LayerCost:
    """Cost of one device for micro-batches of ``size`` samples: with the whole block, or as the device with the largest of ``parts``."""
    ops, held = graph.ops_of(block), graph.parameters_of(block)
    trained = trained_bytes(graph, block, parts)
    scale = 0.5 if recipe.narrow else 1.0  # activations under autocast
    last = [Ref(ops[-1].name, place) for place in range(len(ops[-1].outputs))]
    output = scale * max((int(graph.spec(ref).bytes(size)) for ref in last), default=0)
    return LayerCost(
        forward_s=forward_s,
        backward_s=backward_s,
        update_s=update_s,
        parameter_bytes=sum(_stored_bytes(p, parts) for p in held),
        gradient_bytes=trained,
        optimizer_bytes=round(recipe.states * trained),
        kept_bytes=round(scale * _kept_bytes(ops, size, parts)),
        # Blocks that are alike read what they make.
        kept_bytes_recomputed=round(scale * max((_tensor_bytes(graph, ref, size, parts) for ref in last), default=0)),
        output_bytes=0 if block.stop == len(graph.ops) else round(output),
        workspace_bytes=round(_workspace_bytes(graph, block, size, parts)),
        tied_bytes=sum(_stored_bytes(p, parts) for p in held if p.trainable and p.name in graph.tied_across_blocks),
    )


def typical_blocks(graph: ModelGraph) -> dict[str, Block]:
    """The middle block of each kind: the first and the last may be laid out differently."""
    alike: dict[str, list[Block]] = {}
    for block in graph.blocks:
        alike.setdefault(block.kind, []).append(block)
    return {kind: own[len(own) // 2] for kind, own in alike.items()}


def trained_bytes(graph: ModelGraph, block: Block, parts: StageShares | None = None) -> int:
    """Bytes of the trainable parameters of a block on one device."""
    return sum(_stored_bytes(p, parts) for p in graph.parameters_of(block) if p.trainable)


def meetings_of(graph: ModelGraph, block: Block, parts: StageShares) -> list[StageCollective]:
    """The collectives of a sharded stage inside a block; those of the model's outputs count to the last block."""
    ops = graph.ops_of(block)
    before = {op.name for op in ops} | ({None} if block.stop == len(graph.ops) else set())
    own = [conversion(axis, exchange, parts) for axis, exchange in exchanges_of(parts) if exchange.before in before]
    inside = (within(op, parts) for op in ops if op.name in parts.sharding.strategies)
    return [*own, *(meeting for meeting in inside if meeting is not None)]


def _stored_bytes(parameter: Parameter, parts: StageShares | None) -> int:
    if parts is None:
        return parameter.bytes
    boxes = (tuple(Slice(*cut) for cut in box) for box in parts.sharding.boxes(parameter.name))
    return ceil(parameter.bytes * max(numel(box, parameter.shape) for box in boxes) / max(1, prod(parameter.shape)))


def _kept_bytes(ops: Sequence[Op], size: int, parts: StageShares | None) -> float:
    if parts is None:
        return sum(op.bytes_saved(size) for op in ops)
    return max(
        sum(op.bytes_saved(size) * parts.of_op(op).kept[member] for op in ops) for member in range(parts.members)
    )


def _tensor_bytes(graph: ModelGraph, ref: Ref, size: int, parts: StageShares | None) -> float:
    whole = int(graph.spec(ref).bytes(size))
    if parts is None or ref not in parts.sharding.layouts:
        return whole
    return whole * max(parts.of_tensor(ref, *parts.lies(ref)))


def _workspace_bytes(graph: ModelGraph, block: Block, size: int, parts: StageShares | None) -> float:
    """Bytes of the largest tensor that is made, and of the largest collective."""
    ops = graph.ops_of(block)
    made = (_tensor_bytes(graph, Ref(op.name, place), size, parts) for op in ops for place in range(len(op.outputs)))
    sent = () if parts is None else meetings_of(graph, block, parts)
    exchanged = (buffer_bytes(each) for meeting in sent for each in (*meeting.forward, *meeting.backward))
    return max(made, default=0.0) + max(exchanged, default=0.0)

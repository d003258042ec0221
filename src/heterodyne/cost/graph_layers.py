"""The table of layer costs of a captured model: bytes from its graph, seconds from whoever knows them.

The layers are the blocks of the graph. Seconds come from `BlockTimes`: a small profile (`measured_times`), the devices that are here in
classes (`class_times`), datasheets (`predictor.datasheet_times`), or a profile and datasheets (`predictor.scaled_times`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import ceil, prod
from typing import NamedTuple, Protocol

from heterodyne.cost.exchange import buffer_bytes
from heterodyne.cost.layers import LayerCost, Widths
from heterodyne.cost.op_shares import StageShares
from heterodyne.cost.recipe import Recipe
from heterodyne.cost.stage_collectives import StageCollective, conversion, exchanges_of, within
from heterodyne.graph.ir import Block, ModelGraph, Op, Parameter, Ref
from heterodyne.plan.boxes import Slice, numel

__all__ = ["BlockTime", "BlockTimes", "GraphLayers", "meetings_of", "trained_bytes"]


class BlockTime(NamedTuple):
    """Of one micro-batch of a block on one device of a stage, as of a `LayerCost`.

    Args:
        parts: what of each op and tensor a device has; None: the whole block.
        kept_bytes, workspace_bytes: as measured; None: those of the graph.
    """

    forward_s: float
    backward_s: float
    update_s: float
    parts: StageShares | None = None
    kept_bytes: int | None = None
    workspace_bytes: int | None = None


class BlockTimes(Protocol):
    """Who knows how long blocks of one model take on kinds of devices."""

    @property
    def graph(self) -> ModelGraph: ...

    @property
    def recipe(self) -> Recipe: ...

    def widths(self, device_kind: str) -> tuple[Widths, ...]:
        """See `LayerCosts.widths`."""

    def time(self, device_kind: str, block: Block, widths: Widths, size: int) -> BlockTime | None:
        """One of its widths, for micro-batches of ``size`` samples that are not shared out; None where it is not known."""


@dataclass(frozen=True)
class GraphLayers:
    """Implements `cost.layers.LayerCosts`."""

    times: BlockTimes
    _made: dict[tuple[str, str, Widths, int], LayerCost | None] = field(default_factory=dict, repr=False, compare=False)
    _widths: dict[str, tuple[Widths, ...]] = field(default_factory=dict, repr=False, compare=False)

    @cached_property
    def layers(self) -> tuple[str, ...]:
        return tuple(block.kind for block in self.times.graph.blocks)

    @cached_property
    def _typical(self) -> Mapping[str, Block]:
        """The middle block of each kind: the first and the last may be laid out differently."""
        alike: dict[str, list[Block]] = {}
        for block in self.times.graph.blocks:
            alike.setdefault(block.kind, []).append(block)
        return {kind: own[len(own) // 2] for kind, own in alike.items()}

    def widths(self, device_kind: str) -> tuple[Widths, ...]:
        if device_kind not in self._widths:
            self._widths[device_kind] = self.times.widths(device_kind)
        return self._widths[device_kind]

    def cost(self, device_kind: str, layer_kind: str, widths: Widths, micro_batch: int) -> LayerCost | None:
        """None for a kind of device or of block that there is not, where samples would be divided, and as `BlockTimes.time`."""
        if layer_kind not in self._typical or widths not in self.widths(device_kind) or micro_batch % widths.data:
            return None
        key = (device_kind, layer_kind, widths._replace(data=1), micro_batch // widths.data)
        if key not in self._made:
            kind, _, own, size = key
            block = self._typical[layer_kind]
            time = self.times.time(kind, block, own, size)
            self._made[key] = None if time is None else _cost(self.times.graph, block, size, self.times.recipe, time)
        made = self._made[key]
        return None if made is None else made.beside(widths.data)


def _cost(graph: ModelGraph, block: Block, size: int, recipe: Recipe, time: BlockTime) -> LayerCost:
    """Of one device for micro-batches of ``size`` samples: with the whole block, or as the device with the largest of the parts."""
    ops, held, parts = graph.ops_of(block), graph.parameters_of(block), time.parts
    trained = trained_bytes(graph, block, parts)
    scale = 0.5 if recipe.narrow else 1.0  # activations under autocast
    last = [Ref(ops[-1].name, place) for place in range(len(ops[-1].outputs))]
    output = scale * max((int(graph.spec(ref).bytes(size)) for ref in last), default=0)
    kept = round(scale * _kept_bytes(ops, size, parts)) if time.kept_bytes is None else time.kept_bytes
    # Blocks that are alike read what they make.
    again = round(scale * max((_tensor_bytes(graph, ref, size, parts) for ref in last), default=0))
    passing = time.workspace_bytes
    return LayerCost(
        forward_s=time.forward_s,
        backward_s=time.backward_s,
        update_s=time.update_s,
        parameter_bytes=sum(_stored_bytes(p, parts) for p in held),
        gradient_bytes=trained,
        optimizer_bytes=round(recipe.states * trained),
        kept_bytes=kept,
        kept_bytes_recomputed=again if time.kept_bytes is None else min(kept, again),
        output_bytes=0 if block.stop == len(graph.ops) else round(output),
        workspace_bytes=round(_workspace_bytes(graph, block, size, parts)) if passing is None else passing,
        tied_bytes=sum(_stored_bytes(p, parts) for p in held if p.trainable and p.name in graph.tied_across_blocks),
    )


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

"""The table of layer costs of any captured model, op by op, filled from datasheets.

The layers are the blocks of the graph. Devices of a stage have samples of their own, or parts of all weights or of the sequence, as the
rules of the ops allow (`graph_parts`); on each then counts the device with the largest part of an op.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from math import prod

from heterodyne.cluster.fleet import Fleet
from heterodyne.cost.block_cost import block_cost, trained_bytes, typical_blocks
from heterodyne.cost.layers import DATA_WIDTHS, LayerCost, Widths
from heterodyne.cost.op_shares import StageShares
from heterodyne.cost.recipe import Recipe
from heterodyne.graph.ir import Block, ModelGraph, Op, Ref
from heterodyne.plan.precision import precision_of
from heterodyne.predictor.devices import chip_of, networks_of
from heterodyne.predictor.graph_parts import GraphParts, exchanged_s
from heterodyne.predictor.kernels import Attention, Kernels, Product
from heterodyne.predictor.network import Network
from heterodyne.predictor.roofline import Chip, kernels_s
from heterodyne.predictor.software import Software

__all__ = ["GraphLayers", "graph_layers"]

_ATTENTION = "scaled_dot_product_attention"
_VIEWS = frozenset(
    {"view", "reshape", "transpose", "permute", "expand", "unsqueeze", "squeeze", "slice", "select", "t", "detach"}
)
_PARTS = (2, 4, 8)
_LEAST_FLOPS_A_BYTE = 1.0
"""Ops with fewer are elementwise: their operations never count."""


@dataclass(frozen=True, kw_only=True)
class GraphLayers:
    """Implements `cost.layers.LayerCosts`."""

    graph: ModelGraph
    chips: Mapping[str, Chip]
    networks: Mapping[str, Network]
    recipe: Recipe = field(default_factory=Recipe)
    software: Software = field(default_factory=Software)
    _made: dict[tuple[str, str, Widths, int], LayerCost | None] = field(default_factory=dict, repr=False, compare=False)

    @cached_property
    def layers(self) -> tuple[str, ...]:
        return tuple(block.kind for block in self.graph.blocks)

    @cached_property
    def _typical(self) -> Mapping[str, Block]:
        return typical_blocks(self.graph)

    @cached_property
    def _parts(self) -> GraphParts:
        return GraphParts(graph=self.graph)

    def widths(self, device_kind: str) -> tuple[Widths, ...]:
        """In one way beside the samples, inside a node."""
        if device_kind not in self.networks:
            return ()
        node = self.networks[device_kind].devices
        ways = [Widths(), *(Widths(**{way: n}) for way in ("tensor", "context") for n in _PARTS if n <= node)]
        found = (own._replace(data=data) for own in ways for data in DATA_WIDTHS)
        return tuple(own for own in found if own.devices <= node or own.devices == own.data)

    def cost(self, device_kind: str, layer_kind: str, widths: Widths, micro_batch: int) -> LayerCost | None:
        """None for a kind of device or of block that there is not, where samples would be divided, and for parts in which the model does
        not get smaller.
        """
        if layer_kind not in self._typical or widths not in self.widths(device_kind) or micro_batch % widths.data:
            return None
        own = widths._replace(data=1)
        key = (device_kind, layer_kind, own, micro_batch // widths.data)
        if key not in self._made:
            self._made[key] = self._cost(*key)
        made = self._made[key]
        return None if made is None else made.beside(widths.data)

    def _cost(self, device_kind: str, layer_kind: str, widths: Widths, size: int) -> LayerCost | None:
        block, chip = self._typical[layer_kind], self.chips[device_kind]
        parts, exchanged = None, (0.0, 0.0)
        if widths.devices > 1:
            parts = self._parts.of("split" if widths.tensor > 1 else "context", widths.devices, size)
            if parts is None:
                return None
            scale = 0.5 if self.recipe.precision == "bf16" else 1.0
            exchanged = exchanged_s(block, parts, self.networks[device_kind], scale)
        kernels = _kernels(self.graph.ops_of(block), size, parts)
        forward, backward = kernels_s(kernels, chip, launch=self.software.launch)
        trained = trained_bytes(self.graph, block, parts)
        return block_cost(
            self.graph,
            block,
            size,
            self.recipe,
            forward_s=forward + exchanged[0],
            # A gradient is read and added to a sum.
            backward_s=backward + exchanged[1] + 3 * trained / chip.memory_bytes_per_s,
            update_s=self.recipe.update_passes * trained / chip.memory_bytes_per_s,
            parts=parts,
        )


def _kernels(ops: tuple[Op, ...], size: int, parts: StageShares | None) -> Kernels:
    """Products where an op computes more than it moves; else what it moves."""
    products: list[Product] = []
    attention: list[Attention] = []
    moved = launches = 0.0
    for op in ops:
        if op.kind in _VIEWS:
            continue
        launches += 1
        flops, read, written = op.flops_forward(size), op.bytes_read(size), op.bytes_written(size)
        product = flops > _LEAST_FLOPS_A_BYTE * (read + written)
        if parts is not None:
            own = parts.of_op(op)
            flops, read, written = flops * max(own.operations), read * max(own.read), written * max(own.written)
        if op.kind == _ATTENTION:
            *_, seq, head = (float(dim(size)) for dim in op.outputs[0].shape)
            attention.append(Attention(flops=flops, bytes=read + written, seq=seq, head=head))
        elif product:
            products.append(_product(op, flops, _shape(op, size, parts)))
        else:
            moved += read + written
    return Kernels(products=tuple(products), attention=tuple(attention), moved_bytes=moved, launches=launches)


def _shape(op: Op, size: int, parts: StageShares | None) -> list[float]:
    """Of what an op makes on a device."""
    shape = [float(dim(size)) for dim in op.outputs[0].shape] or [1.0]
    strategy = None if parts is None else parts.sharding.strategies.get(op.name)
    if parts is not None and strategy is not None and strategy.outputs[0].kind == "shard":
        layout = strategy.outputs[0]
        shape[layout.dim] *= max(parts.of_tensor(Ref(op.name, 0), layout))
    return shape


def _product(op: Op, flops: float, shape: list[float]) -> Product:
    """As one matrix product: the columns are the channels of a convolution, the last dim of anything else."""
    columns = shape[1] if "conv" in op.kind and len(shape) > 2 else shape[-1]
    numel = max(1.0, prod(shape))
    columns = max(1.0, columns)
    return Product(m=numel / columns, n=columns, k=max(1.0, flops / (2 * numel)))


def graph_layers(
    graph: ModelGraph, fleet: Fleet, *, recipe: Recipe | None = None, software: Software | None = None
) -> GraphLayers:
    """For all kinds of a fleet. Raises ClusterError for a kind whose datasheet lacks a number that is needed."""
    recipe, software = recipe or Recipe(), software or Software()
    chips = {
        kind: chip_of(fleet.accelerator(kind), precision_of(recipe.precision, kind), software) for kind in fleet.kinds
    }
    return GraphLayers(graph=graph, chips=chips, networks=networks_of(fleet), recipe=recipe, software=software)

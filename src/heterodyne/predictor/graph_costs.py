"""The table of layer costs of any captured model, op by op, filled from datasheets.

The layers are the blocks of the graph. Devices of a stage have samples of their own; layers in parts are not here: what an op costs in
parts follows from the sharding of the graph.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from math import prod

from heterodyne.cluster.fleet import Fleet
from heterodyne.cost.block_cost import block_cost
from heterodyne.cost.layers import DATA_WIDTHS, LayerCost, Widths
from heterodyne.cost.recipe import Recipe
from heterodyne.graph.ir import Block, ModelGraph, Op
from heterodyne.predictor.devices import chip_of
from heterodyne.predictor.kernels import Attention, Kernels, Product
from heterodyne.predictor.roofline import Chip, kernels_s
from heterodyne.predictor.software import Software

__all__ = ["GraphLayers", "graph_layers"]

_ATTENTION = "scaled_dot_product_attention"
_VIEWS = frozenset(
    {"view", "reshape", "transpose", "permute", "expand", "unsqueeze", "squeeze", "slice", "select", "t", "detach"}
)
_LEAST_FLOPS_A_BYTE = 1.0
"""Ops with fewer are elementwise: their operations never count."""


@dataclass(frozen=True, kw_only=True)
class GraphLayers:
    """Implements `cost.layers.LayerCosts` for whole layers."""

    graph: ModelGraph
    chips: Mapping[str, Chip]
    recipe: Recipe = field(default_factory=Recipe)
    software: Software = field(default_factory=Software)
    _made: dict[tuple[str, str, int], LayerCost] = field(default_factory=dict, repr=False, compare=False)

    @cached_property
    def layers(self) -> tuple[str, ...]:
        return tuple(block.kind for block in self.graph.blocks)

    @cached_property
    def _first(self) -> Mapping[str, Block]:
        return {block.kind: block for block in reversed(self.graph.blocks)}

    def widths(self, device_kind: str) -> tuple[Widths, ...]:
        return tuple(Widths(data=data) for data in DATA_WIDTHS) if device_kind in self.chips else ()

    def cost(self, device_kind: str, layer_kind: str, widths: Widths, micro_batch: int) -> LayerCost | None:
        """None for a kind of device or of block that there is not, and for parts of a layer, of a sequence or of a sample."""
        own = widths.alone(micro_batch)
        if own is None or device_kind not in self.chips or layer_kind not in self._first:
            return None
        key = (device_kind, layer_kind, own)
        if key not in self._made:
            self._made[key] = self._cost(self.chips[device_kind], self._first[layer_kind], own)
        return self._made[key].beside(widths.data)

    def _cost(self, chip: Chip, block: Block, size: int) -> LayerCost:
        ops = self.graph.ops_of(block)
        forward, backward = kernels_s(_kernels(ops, size), chip, launch=self.software.launch)
        trained = sum(p.bytes for p in self.graph.parameters_of(block) if p.trainable)
        return block_cost(
            self.graph,
            block,
            size,
            self.recipe,
            forward_s=forward,
            backward_s=backward + 3 * trained / chip.memory_bytes_per_s,  # a gradient is read and added to a sum
            update_s=self.recipe.update_passes * trained / chip.memory_bytes_per_s,
        )


def _kernels(ops: tuple[Op, ...], size: int) -> Kernels:
    """Products where an op computes more than it moves; else what it moves."""
    products: list[Product] = []
    attention: list[Attention] = []
    moved = launches = 0.0
    for op in ops:
        if op.kind in _VIEWS:
            continue
        launches += 1
        flops, traffic = op.flops_forward(size), op.bytes_read(size) + op.bytes_written(size)
        if op.kind == _ATTENTION:
            attention.append(Attention(flops=flops, bytes=traffic))
        elif flops > _LEAST_FLOPS_A_BYTE * traffic:
            products.append(_product(op, flops, size))
        else:
            moved += traffic
    return Kernels(products=tuple(products), attention=tuple(attention), moved_bytes=moved, launches=launches)


def _product(op: Op, flops: float, size: int) -> Product:
    """As one matrix product: the columns are the channels of a convolution, the last dim of anything else."""
    shape = [float(dim(size)) for dim in op.outputs[0].shape] or [1.0]
    columns = shape[1] if "conv" in op.kind and len(shape) > 2 else shape[-1]
    numel = max(1.0, prod(shape))
    columns = max(1.0, columns)
    return Product(m=numel / columns, n=columns, k=max(1.0, flops / (2 * numel)))


def graph_layers(
    graph: ModelGraph, fleet: Fleet, *, recipe: Recipe | None = None, software: Software | None = None
) -> GraphLayers:
    """For all kinds of a fleet. Raises ClusterError for a kind whose datasheet lacks a number that is needed."""
    recipe, software = recipe or Recipe(), software or Software()
    chips = {kind: chip_of(fleet.accelerator(kind), recipe.precision, software) for kind in fleet.kinds}
    return GraphLayers(graph=graph, chips=chips, recipe=recipe, software=software)

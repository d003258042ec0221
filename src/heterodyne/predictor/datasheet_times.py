"""Seconds of any captured model on devices that nobody has measured, op by op, from datasheets.

Devices of a stage have samples of their own, or parts of all weights or of the sequence, as the rules of the ops allow; on each then
counts the device with the largest part of an op. How tensors lie and what is exchanged is worked out for the whole model as one stage, as
the runtime works it out (`plan.sharded_stage`); alike blocks then lie alike. At the borders of a stage samples are dealt out too, which
costs it a gather more that is not counted here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Final

from heterodyne.cluster.fleet import Fleet
from heterodyne.cost.exchange import Round
from heterodyne.cost.graph_layers import BlockTime, GraphLayers, meetings_of, trained_bytes
from heterodyne.cost.layers import DATA_WIDTHS, WAYS, Way, Widths
from heterodyne.cost.op_shares import StageShares
from heterodyne.cost.recipe import Recipe
from heterodyne.errors import PlanError
from heterodyne.graph.ir import Block, ModelGraph, Op, Ref
from heterodyne.graph.sharding import Sharding
from heterodyne.plan.micro_batches import MicroBatches
from heterodyne.plan.plan import Layout, Pipeline, Region, Stage
from heterodyne.plan.precision import precision_of
from heterodyne.plan.sharded_stage import shard_stage
from heterodyne.predictor.devices import chip_of, networks_of
from heterodyne.predictor.kernels import Attention, Kernels, Product
from heterodyne.predictor.network import Network
from heterodyne.predictor.roofline import Chip, kernels_s
from heterodyne.predictor.software import Software

__all__ = ["DatasheetTimes", "datasheet_times", "graph_layers"]

_ATTENTION = "scaled_dot_product_attention"
_VIEWS = frozenset(
    {"view", "reshape", "transpose", "permute", "expand", "unsqueeze", "squeeze", "slice", "select", "t", "detach"}
)
_PARTS = (2, 4, 8)
_LEAST_FLOPS_A_BYTE = 1.0
"""Ops with fewer are elementwise: their operations never count."""
_SAMPLES: Final = {"split": 4, "context": 1}
"""Of the micro-batch for which it is worked out what lies how: sequences are cut where one alone is long, else samples would be."""


@dataclass(frozen=True, kw_only=True)
class DatasheetTimes:
    """Implements `cost.graph_layers.BlockTimes`."""

    graph: ModelGraph
    chips: Mapping[str, Chip]
    networks: Mapping[str, Network]
    recipe: Recipe = field(default_factory=Recipe)
    software: Software = field(default_factory=Software)
    _shardings: dict[tuple[Way, int], Sharding | None] = field(default_factory=dict, repr=False, compare=False)
    _parts: dict[tuple[Way, int, int], StageShares] = field(default_factory=dict, repr=False, compare=False)

    def widths(self, device_kind: str) -> tuple[Widths, ...]:
        """In one way beside the samples, inside a node."""
        if device_kind not in self.networks:
            return ()
        node = self.networks[device_kind].devices
        ways = [Widths(), *(Widths.along(way, n) for way in WAYS for n in _PARTS if n <= node)]
        found = (own._replace(data=data) for own in ways for data in DATA_WIDTHS)
        return tuple(own for own in found if own.devices <= node or own.devices == own.data)

    def time(self, device_kind: str, block: Block, widths: Widths, size: int) -> BlockTime | None:
        """None for parts in which the model does not get smaller."""
        chip, parts, exchanged = self.chips[device_kind], None, (0.0, 0.0)
        if widths.devices > 1:
            parts = self._of_members(widths.way, widths.devices, size)
            if parts is None:
                return None
            scale = 0.5 if self.recipe.precision == "bf16" else 1.0
            exchanged = _exchanged_s(block, parts, self.networks[device_kind], scale)
        kernels = _kernels(self.graph.ops_of(block), size, parts)
        forward, backward = kernels_s(kernels, chip, launch=self.software.launch)
        trained = trained_bytes(self.graph, block, parts)
        return BlockTime(
            forward_s=forward + exchanged[0],
            # A gradient is read and added to a sum.
            backward_s=backward + exchanged[1] + 3 * trained / chip.memory_bytes_per_s,
            update_s=self.recipe.update_passes * trained / chip.memory_bytes_per_s,
            parts=parts,
        )

    def _of_members(self, way: Way, members: int, samples: int) -> StageShares | None:
        """For micro-batches of so many samples on so many alike devices; None where the model does not get smaller so."""
        if (way, members) not in self._shardings:
            try:
                self._shardings[way, members] = self._sharded(way, members)
            except PlanError:  # something works in place on what would be cut, or samples cannot be distinguished
                self._shardings[way, members] = None
        sharding = self._shardings[way, members]
        if sharding is None:
            return None
        key = (way, members, samples)
        if key not in self._parts:
            self._parts[key] = StageShares(sharding=sharding, samples=samples)
        return self._parts[key]

    def _sharded(self, way: Way, members: int) -> Sharding | None:
        stage = Stage(
            ops=(0, len(self.graph.ops)),
            devices=tuple(map(str, range(members))),
            regions=(Region(layout=Layout(kind=way, shares=(1,) * members)),),
        )
        pipeline = Pipeline(micro_batches=MicroBatches((_SAMPLES[way],)), stages=(stage,))
        found = shard_stage(self.graph, pipeline, 0)
        return found if found is not None and found.divides else None


def _exchanged_s(block: Block, parts: StageShares, network: Network, scale: float) -> tuple[float, float]:
    """Seconds of a forward and of a backward in which the devices exchange inside of a block. ``scale``: of activations' bytes."""
    forward = backward = 0.0
    for meeting in meetings_of(parts.sharding.graph, block, parts):
        of_bytes = 1.0 if meeting.inside else scale  # statistics are in single precision
        forward += _rounds_s(meeting.forward, network, of_bytes)
        backward += _rounds_s(meeting.backward, network, of_bytes)
    return forward, backward


def _rounds_s(rounds: Iterable[Round], network: Network, scale: float) -> float:
    return sum(
        network.all_to_all_s(network.group(len(sent)), scale * max(sum(of_member) for of_member in sent))
        for sent in rounds
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


def datasheet_times(
    graph: ModelGraph, fleet: Fleet, *, recipe: Recipe | None = None, software: Software | None = None
) -> DatasheetTimes:
    """For all kinds of a fleet. Raises ClusterError for a kind whose datasheet lacks a number that is needed."""
    recipe, software = recipe or Recipe(), software or Software()
    chips = {
        kind: chip_of(fleet.accelerator(kind), precision_of(recipe.precision, kind), software) for kind in fleet.kinds
    }
    return DatasheetTimes(graph=graph, chips=chips, networks=networks_of(fleet), recipe=recipe, software=software)


def graph_layers(
    graph: ModelGraph, fleet: Fleet, *, recipe: Recipe | None = None, software: Software | None = None
) -> GraphLayers:
    """The table of layer costs from `datasheet_times`."""
    return GraphLayers(datasheet_times(graph, fleet, recipe=recipe, software=software))

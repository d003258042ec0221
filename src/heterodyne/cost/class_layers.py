"""Layer costs of a model on classes of measured devices: those of `cost.model` for one member, for any number of members.

The layers are the blocks of the graph. A sharded stage costs what its devices take together, collectives included, on the first devices
of the class in one node.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal

from heterodyne.cost.block_cost import block_cost, trained_bytes, typical_blocks
from heterodyne.cost.layers import LayerCost, Widths
from heterodyne.cost.memory import gradient_bytes
from heterodyne.cost.model import CostModel
from heterodyne.cost.sharded_stage import ShardedStageCost
from heterodyne.errors import MeasureError, PlanError
from heterodyne.graph.ir import Block
from heterodyne.plan.micro_batches import MicroBatches
from heterodyne.plan.plan import Pipeline, Stage

__all__ = ["ClassLayers", "Way"]

Way = Literal["split", "context"]
"""Of weights, or of sequences."""


@dataclass(frozen=True, kw_only=True)
class ClassLayers:
    """Implements `cost.layers.LayerCosts`.

    Args:
        members: for each class its devices.
        largest: for each class the largest micro-batch of one device.
        stage: makes a stage of the whole model on some devices, sharded in one way.
        ways: the ways to shard that are tried.
        whole: the classes whose devices have memory for the whole model.
    """

    model: CostModel
    members: Mapping[str, Sequence[str]]
    largest: Mapping[str, int]
    stage: Callable[[Sequence[str], Way], Stage]
    ways: Sequence[Way] = ("split", "context")
    whole: frozenset[str] = frozenset()
    _in_parts: dict[tuple[str, Way, int], ShardedStageCost | None] = field(
        default_factory=dict, repr=False, compare=False
    )
    _made: dict[tuple[str, str, Widths, int], LayerCost | None] = field(default_factory=dict, repr=False, compare=False)

    @property
    def layers(self) -> tuple[str, ...]:
        return tuple(block.kind for block in self.model.graph.blocks)

    @cached_property
    def _typical(self) -> Mapping[str, Block]:
        return typical_blocks(self.model.graph)

    def widths(self, device_kind: str) -> tuple[Widths, ...]:
        """One device, and powers of two of the devices of the class in one node, in the ways that pay."""
        most = len(self._beside(device_kind))
        names = {"split": "tensor", "context": "context"}
        powers = [1 << power for power in range(1, most.bit_length())]
        ways = [way for way in self.ways if powers and self._pays(device_kind, way)]
        return (Widths(), *(Widths(**{names[way]: count}) for way in ways for count in powers))

    def _pays(self, device_kind: str, way: Way) -> bool:
        """Whether devices that could hold the whole model gain from sharding it: where two take longer than one, more do so too, since each
        communicates more.
        """
        together = self._together(device_kind, way, 2)
        if together is None or device_kind not in self.whole:
            return together is not None
        size = self.largest[device_kind]
        alone_s = self.model.compute[self.members[device_kind][0]].micro_batch_s(size)
        return sum(together.together_s(direction, size)[0] for direction in ("F", "B")) < alone_s

    def cost(self, device_kind: str, layer_kind: str, widths: Widths, micro_batch: int) -> LayerCost | None:
        """None above the largest micro-batch, and for sharding that does not make the model smaller."""
        if widths not in self.widths(device_kind) or micro_batch > self.largest[device_kind]:
            return None
        key = (device_kind, layer_kind, widths, micro_batch)
        if key not in self._made:
            self._made[key] = self._cost(device_kind, self._typical[layer_kind], widths, micro_batch)
        return self._made[key]

    def _cost(self, device_kind: str, block: Block, widths: Widths, size: int) -> LayerCost | None:
        device, span = self.members[device_kind][0], (block.start, block.stop)
        compute, parts = self.model.compute[device], None
        forward_s, backward_s = compute.seconds("F", span, size), compute.seconds("B", span, size)
        if widths.devices > 1:
            together = self._together(device_kind, "split" if widths.tensor > 1 else "context", widths.devices)
            if together is None:
                return None
            parts = together.parts(size)
            forward_s, backward_s = (together.together_s(kind, size, span)[0] for kind in ("F", "B"))
        trained = trained_bytes(self.model.graph, block, parts)
        cost = block_cost(
            self.model.graph,
            block,
            size,
            self.model.recipe,
            forward_s=forward_s,
            backward_s=backward_s,
            update_s=self.model.measured(device).optimizer_s_per_byte * trained * (1 + self.model.recipe.clip_to_step),
            parts=parts,
        )
        return cost if parts is not None else self._with_measured_bytes(cost, device, block, size)

    def _with_measured_bytes(self, cost: LayerCost, device: str, block: Block, size: int) -> LayerCost:
        """The cost of a whole block with the bytes that `DeviceMemory` counts for its activations and its workspace."""
        memory, span = self.model.device_memory[device], (block.start, block.stop)
        # Where no peak was measured, the gradient that autograd hands over is no part of the workspace.
        weights = [gradient_bytes(p) for p in self.model.graph.parameters_of(block) if p.trainable]
        handed = 0 if memory.tells_peaks else max(weights, default=0)
        kept = memory.activations(size, span)
        return replace(
            cost,
            kept_bytes=kept,
            kept_bytes_recomputed=min(kept, cost.kept_bytes_recomputed),
            workspace_bytes=memory.workspace(size, span) + memory.holes(size, span) + handed,
        )

    def _beside(self, device_kind: str) -> Sequence[str]:
        """The members in the first node that has most of them."""
        nodes: dict[str, list[str]] = {}
        for device in self.members[device_kind]:
            nodes.setdefault(self.model.cluster.device(device).node, []).append(device)
        return max(nodes.values(), key=len)

    def _together(self, device_kind: str, way: Way, count: int) -> ShardedStageCost | None:
        key = (device_kind, way, count)
        if key not in self._in_parts:
            stage = self.stage(self._beside(device_kind)[:count], way)
            pipeline = Pipeline(micro_batches=MicroBatches((self.largest[device_kind],)), stages=(stage,))
            try:
                found = self.model.sharded_stage(pipeline, 0)
            except (PlanError, MeasureError):  # it cannot lie so, or nothing is known of what joins the devices
                found = None
            divides = found is not None and any(strategy.divides for strategy in found.sharding.strategies.values())
            self._in_parts[key] = found if divides else None
        return self._in_parts[key]

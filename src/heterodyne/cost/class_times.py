"""Seconds of a model on classes of measured devices: those of `cost.model` for one member, for any number of members.

A sharded stage costs what its devices take together, collectives included, on the first devices of the class in one node.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from heterodyne.cost.graph_layers import BlockTime, trained_bytes
from heterodyne.cost.layers import Way, Widths
from heterodyne.cost.memory import gradient_bytes
from heterodyne.cost.model import CostModel
from heterodyne.cost.recipe import Recipe
from heterodyne.cost.sharded_stage import ShardedStageCost
from heterodyne.errors import MeasureError, PlanError
from heterodyne.graph.ir import Block, ModelGraph
from heterodyne.plan.micro_batches import MicroBatches
from heterodyne.plan.plan import Pipeline, Stage

__all__ = ["ClassTimes"]


@dataclass(frozen=True, kw_only=True)
class ClassTimes:
    """Implements `cost.graph_layers.BlockTimes`.

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

    @property
    def graph(self) -> ModelGraph:
        return self.model.graph

    @property
    def recipe(self) -> Recipe:
        return self.model.recipe

    def widths(self, device_kind: str) -> tuple[Widths, ...]:
        """One device, and powers of two of the devices of the class in one node, in the ways that pay."""
        most = len(self._beside(device_kind))
        powers = [1 << power for power in range(1, most.bit_length())]
        ways = [way for way in self.ways if powers and self._pays(device_kind, way)]
        return (Widths(), *(Widths.along(way, count) for way in ways for count in powers))

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

    def time(self, device_kind: str, block: Block, widths: Widths, size: int) -> BlockTime | None:
        """None above the largest micro-batch, and for sharding that does not make the model smaller."""
        if size > self.largest[device_kind]:
            return None
        device, span = self.members[device_kind][0], (block.start, block.stop)
        compute, parts = self.model.compute[device], None
        forward_s, backward_s = compute.seconds("F", span, size), compute.seconds("B", span, size)
        if widths.devices > 1:
            together = self._together(device_kind, widths.way, widths.devices)
            if together is None:
                return None
            parts = together.parts(size)
            forward_s, backward_s = (together.together_s(kind, size, span)[0] for kind in ("F", "B"))
        per_byte_s = self.model.measured(device).optimizer_s_per_byte
        update_s = per_byte_s * trained_bytes(self.graph, block, parts) * (1 + self.recipe.clip_to_step)
        time = BlockTime(forward_s, backward_s, update_s, parts)
        return time if parts is not None else self._with_measured_bytes(time, device, block, size)

    def _with_measured_bytes(self, time: BlockTime, device: str, block: Block, size: int) -> BlockTime:
        """With the bytes that `DeviceMemory` counts for the activations and the workspace of a whole block."""
        memory, span = self.model.device_memory[device], (block.start, block.stop)
        # Where no peak was measured, the gradient that autograd hands over is no part of the workspace.
        weights = [gradient_bytes(p) for p in self.graph.parameters_of(block) if p.trainable]
        handed = 0 if memory.tells_peaks else max(weights, default=0)
        return time._replace(
            kept_bytes=memory.activations(size, span),
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
            self._in_parts[key] = found if found is not None and found.sharding.divides else None
        return self._in_parts[key]

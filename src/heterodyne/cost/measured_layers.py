"""The table of layer costs of a model that was measured: a small profile, one device of each kind, scaled to any number of them.

The layers are the blocks of the graph. Seconds are the measured ones (scaled to the model in one piece, where that was measured too), bytes
those of the graph. Nothing was measured sharded: devices of a stage have samples of their own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from heterodyne.cluster.profile import Profile
from heterodyne.cost.block_cost import block_cost, trained_bytes
from heterodyne.cost.compute import Compute, compute_of
from heterodyne.cost.layers import DATA_WIDTHS, LayerCost, Widths
from heterodyne.cost.recipe import Recipe
from heterodyne.graph.ir import Block, ModelGraph

__all__ = ["MeasuredLayers", "kind_of"]


def kind_of(device_id: str) -> str:
    """``V100-SXM2-16GB`` of ``old-0/V100-SXM2-16GB:3``."""
    return device_id.rpartition("/")[2].rpartition(":")[0]


@dataclass(frozen=True, kw_only=True)
class MeasuredLayers:
    """Implements `cost.layers.LayerCosts`. Of several measured devices of a kind the first counts.

    Raises MeasureError, from `cost` and `largest`, if a kind of block was not measured on a device.
    """

    graph: ModelGraph
    profile: Profile
    recipe: Recipe = field(default_factory=Recipe)
    _made: dict[tuple[str, str, int], LayerCost] = field(default_factory=dict, repr=False, compare=False)

    @cached_property
    def _measured(self) -> Mapping[str, str]:
        """The device of each kind."""
        return {kind_of(device): device for device in reversed(tuple(self.profile.devices))}

    @cached_property
    def _compute(self) -> Mapping[str, Compute]:
        return {
            kind: compute_of(self.graph, device, self.profile.devices[device])
            for kind, device in self._measured.items()
        }

    @cached_property
    def _sizes(self) -> Mapping[str, int]:
        """The largest micro-batch that was measured, by kind of device."""
        return {
            kind: min(
                max(sample.micro_batch_size for sample in self.profile.devices[compute.device].blocks[block])
                for block in self.graph.kinds
            )
            for kind, compute in self._compute.items()  # which says what was not measured
        }

    @property
    def kinds(self) -> tuple[str, ...]:
        """Of devices, that were measured."""
        return tuple(self._measured)

    def largest(self, device_kind: str) -> int | None:
        """The largest micro-batch that was measured on a kind; None for one that was not."""
        return self._sizes.get(device_kind)

    @property
    def layers(self) -> tuple[str, ...]:
        return tuple(block.kind for block in self.graph.blocks)

    def widths(self, device_kind: str) -> tuple[Widths, ...]:
        return tuple(Widths(data=data) for data in DATA_WIDTHS) if device_kind in self._measured else ()

    def cost(self, device_kind: str, layer_kind: str, widths: Widths, micro_batch: int) -> LayerCost | None:
        """None for a kind that was not measured, parts of a layer or of a sequence, and above the largest micro-batch that was measured."""
        own = widths.alone(micro_batch)
        if own is None or device_kind not in self._measured or layer_kind not in self.graph.kinds:
            return None
        compute = self._compute[device_kind]
        if own > self._sizes[device_kind]:
            return None
        key = (device_kind, layer_kind, own)
        if key not in self._made:
            self._made[key] = self._cost(compute, device_kind, self.graph.kinds[layer_kind], own)
        return self._made[key].beside(widths.data)

    def _cost(self, compute: Compute, device_kind: str, block: Block, size: int) -> LayerCost:
        measured = self.profile.devices[self._measured[device_kind]]
        span = (block.start, block.stop)
        trained = trained_bytes(self.graph, block)
        return block_cost(
            self.graph,
            block,
            size,
            self.recipe,
            forward_s=compute.seconds("F", span, size),
            backward_s=compute.seconds("B", span, size),
            update_s=measured.optimizer_s_per_byte * trained * (1 + self.recipe.clip_to_step),
        )

"""Seconds of a model that was measured: a small profile, one device of each kind, scaled to any number of them.

Seconds are the measured ones (scaled to the model in one piece, where that was measured too). Nothing was measured sharded: devices of a
stage have samples of their own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from heterodyne.cluster.profile import Profile
from heterodyne.cost.compute import Compute, compute_of
from heterodyne.cost.graph_layers import BlockTime, trained_bytes
from heterodyne.cost.layers import DATA_WIDTHS, Widths
from heterodyne.cost.recipe import Recipe
from heterodyne.graph.ir import Block, ModelGraph

__all__ = ["MeasuredTimes", "kind_of"]


def kind_of(device_id: str) -> str:
    """``V100-SXM2-16GB`` of ``old-0/V100-SXM2-16GB:3``."""
    return device_id.rpartition("/")[2].rpartition(":")[0]


@dataclass(frozen=True, kw_only=True)
class MeasuredTimes:
    """Implements `cost.graph_layers.BlockTimes`. Of several measured devices of a kind the first counts.

    Raises MeasureError, from `time` and `largest`, if a kind of block was not measured on a device.
    """

    graph: ModelGraph
    profile: Profile
    recipe: Recipe = field(default_factory=Recipe)

    @cached_property
    def _measured(self) -> Mapping[str, str]:
        """The device of each kind."""
        return {kind_of(device): device for device in reversed(tuple(self.profile.devices))}

    @cached_property
    def compute(self) -> Mapping[str, Compute]:
        """The time curves of each kind."""
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
            for kind, compute in self.compute.items()  # which says what was not measured
        }

    @property
    def kinds(self) -> tuple[str, ...]:
        """Of devices, that were measured."""
        return tuple(self._measured)

    def largest(self, device_kind: str) -> int | None:
        """The largest micro-batch that was measured on a kind; None for one that was not."""
        return self._sizes.get(device_kind)

    def widths(self, device_kind: str) -> tuple[Widths, ...]:
        return tuple(Widths(data=data) for data in DATA_WIDTHS) if device_kind in self._measured else ()

    def time(self, device_kind: str, block: Block, _: Widths, size: int) -> BlockTime | None:
        """None above the largest micro-batch that was measured."""
        compute, span = self.compute[device_kind], (block.start, block.stop)
        if size > self._sizes[device_kind]:
            return None
        per_byte_s = self.profile.devices[compute.device].optimizer_s_per_byte
        return BlockTime(
            forward_s=compute.seconds("F", span, size),
            backward_s=compute.seconds("B", span, size),
            update_s=per_byte_s * trained_bytes(self.graph, block) * (1 + self.recipe.clip_to_step),
        )

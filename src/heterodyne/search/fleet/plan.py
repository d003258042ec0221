"""A plan over a fleet: alike pipelines are one template and a count, so that a plan of 25,000 devices is a few lines."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from types import MappingProxyType
from typing import Literal

from heterodyne.cost.layers import Widths

__all__ = ["ZERO_LEVELS", "FleetPlan", "Group", "Layout", "ScheduleName", "Stage", "Template"]

ScheduleName = Literal["1F1B", "GPipe"]
Layout = Literal["stages", "pipelines"]
ZERO_LEVELS = (0, 1, 2, 3)
"""Of state sharding (ZeRO, Rajbhandari et al., SC 2020): nothing, the state of the optimizer, gradients too, parameters too."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Stage:
    """Layers ``[start, stop)`` on some devices of a pool that share the work by `Widths`: ``width`` of tensor parallelism, ``context``,
    ``data``.
    """

    pool: str
    width: int
    start: int
    stop: int
    recompute: bool = False
    context: int = 1
    data: int = 1

    @property
    def widths(self) -> Widths:
        return Widths(tensor=self.width, context=self.context, data=self.data)

    @property
    def devices(self) -> int:
        return self.width * self.context * self.data


@dataclass(frozen=True, kw_only=True, slots=True)
class Template:
    """One pipeline: its stages in order, and the samples of its micro-batches."""

    micro_batch: int
    stages: tuple[Stage, ...]
    _hash: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        # A search looks templates up far more often than it makes them.
        object.__setattr__(self, "_hash", hash((self.micro_batch, self.stages)))

    def __hash__(self) -> int:
        return self._hash

    @property
    def devices(self) -> Mapping[str, int]:
        """By pool."""
        return _devices(self)


@lru_cache(maxsize=1 << 14)
def _devices(template: Template) -> Mapping[str, int]:
    count: dict[str, int] = {}
    for stage in template.stages:
        count[stage.pool] = count.get(stage.pool, 0) + stage.devices
    return MappingProxyType(count)


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """Alike pipelines, each with as many micro-batches."""

    template: Template
    replicas: int
    num_microbatches: int

    @property
    def capacity(self) -> int:
        """Samples, if every micro-batch is full."""
        return self.replicas * self.num_microbatches * self.template.micro_batch


@dataclass(frozen=True, kw_only=True, slots=True)
class FleetPlan:
    """Groups of pipelines that share a global batch.

    The groups can hold at least ``global_batch`` samples; where they can hold more, micro-batches of the last pipelines of the last
    group are not full.

    Args:
        layout: what shares a node: replicas of a stage (``stages``), or the stages of a pipeline (``pipelines``).
        zero: what all devices that hold a layer share out, of `ZERO_LEVELS`.
    """

    groups: tuple[Group, ...]
    global_batch: int
    schedule: ScheduleName = "1F1B"
    layout: Layout = "stages"
    zero: int = 1

    @property
    def pipelines(self) -> int:
        return sum(group.replicas for group in self.groups)

    @property
    def devices(self) -> Mapping[str, int]:
        """By pool."""
        count: dict[str, int] = {}
        for group in self.groups:
            for pool, devices in group.template.devices.items():
                count[pool] = count.get(pool, 0) + group.replicas * devices
        return count

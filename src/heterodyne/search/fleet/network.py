"""What goes between nodes: messages between stages, and gradients and parameters between the replicas of a layer.

The planner asks through `Network`, so that a better model of collectives can take the place of `rings.Rings`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from heterodyne.cost.layers import Widths
from heterodyne.search.fleet.arrays import Floats
from heterodyne.search.fleet.plan import Layout, Template
from heterodyne.search.fleet.sent import Rates
from heterodyne.search.fleet.stage_sums import StageSums

__all__ = ["Exchange", "Exchanges", "Network", "Placed"]

Placed = Sequence[tuple[Template, int]]
"""Templates, and how many pipelines there are of each."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Exchange:
    """Seconds of the exchanges of each stage of a pipeline with the other replicas of its layers, each of all its layers.

    Args:
        reduced_s: gradients summed, all of them for all. ``scattered_s``: each device its part; ``updated_s``: changed parameters
            back to all.
        scattered_layers_s, gathered_layers_s: gradients scattered, parameters gathered, layer by layer.
        backward_s: what can hide an exchange: the shortest backward of a micro-batch of a stage that holds some of the layers.

    All of shape [stages].
    """

    reduced_s: Floats
    scattered_s: Floats
    updated_s: Floats
    scattered_layers_s: Floats
    gathered_layers_s: Floats
    backward_s: Floats


@dataclass(frozen=True, kw_only=True, slots=True)
class Exchanges:
    """Of each template, and what it costs in usd to send everything once round."""

    of: Mapping[Template, Exchange]
    gradients_usd: float = 0.0
    updated_usd: float = 0.0
    parameters_usd: float = 0.0


class Network(Protocol):
    """Seconds and money of what goes between devices."""

    def joined(self, a: str, b: str) -> bool:
        """Whether anything is known of the way between two pools."""

    def send_s(self, template: Template, stage: int, size_bytes: float, layout: Layout) -> float:
        """From a stage of a pipeline to the next one."""

    def summed_s(self, template: Template, places: Sequence[int], size_bytes: float, layout: Layout) -> float:
        """Of an all-reduce between some places of each pipeline, of so many bytes of each."""

    def exchanges(self, placed: Placed, sums_of: Mapping[Template, StageSums], layout: Layout) -> Exchanges:
        """Of gradients and parameters over the replicas of their layers."""

    def least_s_per_byte(self, pool: str, widths: Widths, replicas: int) -> Rates:
        """Of what a ring takes once round a stage on a pool among at least so many replicas: for a byte of a device, if all are in
        one node, and for a byte of the stage, if not. No exchange is shorter than both; infinite where it cannot be.
        """

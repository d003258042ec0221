"""Traffic between devices: messages between stages, and gradients and parameters between the replicas of a layer.

The planner uses the protocol `Network`, so that another model of collectives can take the place of `ring_network.RingNetwork`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from heterodyne.cost.layers import Widths
from heterodyne.search.fleet.arrays import Floats
from heterodyne.search.fleet.comm_volume import Rates
from heterodyne.search.fleet.plan import Layout, Template
from heterodyne.search.fleet.stage_sums import StageSums

__all__ = ["Exchange", "Exchanges", "Network", "Placed"]

Placed = Sequence[tuple[Template, int]]
"""Templates, and how many pipelines there are of each."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Exchange:
    """Seconds of the collectives of each stage with the other replicas of its layers. Shape [stages].

    Args:
        reduced_s: all-reduce of gradients. ``scattered_s``: reduce-scatter of gradients; ``updated_s``: all-gather of updated parameters.
        scattered_layers_s, gathered_layers_s: reduce-scatter of gradients and all-gather of parameters, layer by layer.
        backward_s: what can hide a collective: the shortest backward of a micro-batch of a stage that holds some of the layers.
    """

    reduced_s: Floats
    scattered_s: Floats
    updated_s: Floats
    scattered_layers_s: Floats
    gathered_layers_s: Floats
    backward_s: Floats


@dataclass(frozen=True, kw_only=True, slots=True)
class Exchanges:
    """Collectives of each template, and the price in usd of one ring pass of each kind."""

    of: Mapping[Template, Exchange]
    gradients_usd: float = 0.0
    updated_usd: float = 0.0
    parameters_usd: float = 0.0


class Network(Protocol):
    """Seconds and usd of traffic between devices."""

    def joined(self, a: str, b: str) -> bool:
        """Whether a route between two pools is known."""

    def send_s(self, template: Template, stage: int, size_bytes: float, layout: Layout) -> float:
        """Seconds of a message from a stage to the next one."""

    def summed_s(self, template: Template, places: Sequence[int], size_bytes: float, layout: Layout) -> float:
        """Seconds of an all-reduce of ``size_bytes`` between some ranks of each pipeline."""

    def exchanges(self, placed: Placed, sums_of: Mapping[Template, StageSums], layout: Layout) -> Exchanges:
        """Collectives of gradients and parameters over the replicas of their layers."""

    def least_s_per_byte(self, pool: str, widths: Widths, replicas: int) -> Rates:
        """Lower bounds on the seconds per byte of a ring pass of a stage on a pool with at least ``replicas`` replicas: per byte of a
        device if all are in one node, and per byte of the stage if not. Infinite where impossible.
        """

"""Bytes that the replicas of layers exchange."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple, get_args

import numpy as np

from heterodyne.cost.layers import LayerCost, Widths
from heterodyne.search.fleet.arrays import Floats, sums

__all__ = ["EXCHANGED", "Exchanged", "LayerBytes", "Rates", "Sent", "expert_part", "reduced_bytes"]

Exchanged = Literal["gradients", "updated", "parameters"]
"""What replicas exchange: gradients, the parameters that an optimizer has changed, all parameters."""
EXCHANGED: tuple[Exchanged, ...] = get_args(Exchanged)
Rates = tuple[float, float]
"""Seconds for a byte that a device sends inside its node, and for one that a node sends."""


class Sent(NamedTuple):
    """Bytes that replicas exchange of stages, and what of that a ring of one pipeline need not pass on, since it is kept where it is.

    Along the first axis: of each device of a stage, of one copy of all its layers, which leaves a node that holds it, and of one set of
    its experts, which may lie over several nodes and are not in the copy.
    """

    whole: Floats
    kept: Floats

    def carried(self, replicas: int) -> Floats:
        """By a ring through all replicas once round: one reduce-scatter or all-gather; an all-reduce is two (Patarasuk and Yuan, 2009).

        (n - 1) / n of the bytes, n the devices that hold the same: none where it is one.
        """
        return self.whole - self.kept / replicas


class LayerBytes:
    """Of one kind of bytes of all layers: what of it is exchanged, summed over layers."""

    def __init__(self, values: Sequence[float], costs: Sequence[LayerCost], widths: Widths) -> None:
        experts = [expert_part(cost) for cost in costs]
        routed = [value * expert for value, expert in zip(values, experts, strict=True)]
        plain = [value - own for value, own in zip(values, routed, strict=True)]
        sets = [own * widths.devices / cost.expert_copies for own, cost in zip(routed, costs, strict=True)]
        kept = [own / cost.expert_copies for own, cost in zip(routed, costs, strict=True)]
        self.sums = Sent(
            whole=np.array([sums(values), sums([widths.tensor * a for a in plain]), sums(sets)]),
            kept=np.array(
                [
                    sums([a / widths.copies + b for a, b in zip(plain, kept, strict=True)]),
                    sums([widths.tensor * a / widths.copies for a in plain]),
                    sums([own / cost.expert_copies for own, cost in zip(sets, costs, strict=True)]),
                ]
            ),
        )
        """Of the first layers. Shape [3, layers + 1]."""


def reduced_bytes(cost: LayerCost) -> float:
    return float(cost.gradient_bytes if cost.reduced_bytes is None else cost.reduced_bytes)


def expert_part(cost: LayerCost) -> float:
    """The part of a layer that belongs to experts."""
    reduced = reduced_bytes(cost)
    return cost.expert_bytes / reduced if reduced else 0.0

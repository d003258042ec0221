"""Communication volume between the replicas of layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple, get_args

import numpy as np

from heterodyne.cost.layers import LayerCost, Widths
from heterodyne.search.fleet.arrays import Floats, sums

__all__ = ["EXCHANGED", "CommVolume", "Exchanged", "LayerBytes", "Rates", "expert_part"]

Exchanged = Literal["gradients", "updated", "parameters"]
"""What replicas exchange: gradients, the parameters that an optimizer has changed, all parameters."""
EXCHANGED: tuple[Exchanged, ...] = get_args(Exchanged)
Rates = tuple[float, float]
"""Seconds for a byte that a device sends inside its node, and for one that a node sends."""


class CommVolume(NamedTuple):
    """Bytes that replicas of stages communicate, and what of that a ring inside one pipeline need not send, since it stays on its device.

    Along the first axis: per device of a stage, per copy of all its layers (which leaves the node), and per set of its experts, which
    may span nodes and is not part of the copy.
    """

    whole: Floats
    kept: Floats

    def carried(self, replicas: int) -> Floats:
        """Bytes of one ring pass through all replicas: a reduce-scatter or an all-gather; an all-reduce is two (Patarasuk and Yuan, 2009).

        (n - 1) / n of the bytes for n holders: none for one.
        """
        return self.whole - self.kept / replicas


class LayerBytes:
    """Communicated bytes of one kind, as prefix sums over layers."""

    def __init__(self, values: Sequence[float], costs: Sequence[LayerCost], widths: Widths) -> None:
        experts = [expert_part(cost) for cost in costs]
        routed = [value * expert for value, expert in zip(values, experts, strict=True)]
        plain = [value - own for value, own in zip(values, routed, strict=True)]
        sets = [own * widths.devices / cost.expert_copies for own, cost in zip(routed, costs, strict=True)]
        kept = [own / cost.expert_copies for own, cost in zip(routed, costs, strict=True)]
        self.sums = CommVolume(
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


def expert_part(cost: LayerCost) -> float:
    """The fraction of a layer's bytes that belongs to experts."""
    return cost.expert_bytes / cost.gradient_bytes if cost.gradient_bytes else 0.0

"""What exchanges and work are worth beside each other, in bytes that a device of the stage sends.

All ranks, and whoever predicts, must decide alike, so the decision follows from these few numbers, which a plan carries, and from
nothing that is measured while it runs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from heterodyne.graph.sharding.layout import Collective

__all__ = ["FLOPS_PER_BYTE", "LATENCY_BYTES", "Price"]

LATENCY_BYTES: Final = 2**16
FLOPS_PER_BYTE: Final = 5000
"""What a plan that somebody writes has, unless it says something else: workers of one machine."""


@dataclass(frozen=True, kw_only=True)
class Price:
    """Args:
    members: devices of the stage.
    unevenness: how many times as long the slowest device takes for all of the work as all of them take together.
    latency_bytes: bytes that could be sent while a collective begins.
    flops_per_byte: operations that the stage's devices do together while a byte is sent.
    traffic_per_byte: bytes that they read or write in their memories meanwhile.
    """

    members: int
    unevenness: float
    latency_bytes: float = LATENCY_BYTES
    flops_per_byte: float = FLOPS_PER_BYTE
    traffic_per_byte: float = 20.0

    def collective(self, kind: Collective | None, size: float) -> float:
        """Return the price of a collective over a tensor of ``size`` bytes, whole. An all-reduce is a reduce-scatter and an all-gather."""
        if kind is None or self.members == 1:
            return 0.0
        times = 2 if kind == "all_reduce" else 1
        return self.latency_bytes + times * size * (self.members - 1) / self.members

    def work(self, flops: float, traffic: float, *, divided: bool) -> float:
        """Return the price of an op, forward and backward; not ``divided``: each device does all of it, and the slowest is waited for."""
        together = flops / self.flops_per_byte + traffic / self.traffic_per_byte
        return together if divided else together * self.unevenness

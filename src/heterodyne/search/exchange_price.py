"""The price of communication relative to computing, which decides the layout of tensors in a sharded stage."""

from __future__ import annotations

from collections.abc import Sequence

from heterodyne.cost.model import CostModel
from heterodyne.plan.plan import Exchange

__all__ = ["exchange_price"]


def exchange_price(model: CostModel, devices: Sequence[str], samples_per_s: float) -> Exchange:
    """For the slowest link between any two of the devices, which together compute so many samples of the model per second."""
    if len(devices) < 2:
        return Exchange()
    met = model.collectives.exchange(devices)
    links = [model.collectives.send(a, b) for a in devices for b in devices if a != b] if met is None else [met]
    s_per_byte = max(link.s_per_byte for link in links)
    latency_s = max(link.latency_s for link in links)
    flops = model.graph.flops_forward()(1) + model.graph.flops_backward()(1)
    if s_per_byte <= 0:
        return Exchange(latency_bytes=0, flops_per_byte=1)
    return Exchange(
        latency_bytes=_rounded(latency_s / s_per_byte),
        flops_per_byte=max(1, _rounded(flops * samples_per_s * s_per_byte)),
    )


def _rounded(value: float) -> int:
    """Two digits: what is measured is not known better, and a plan should read the same after every measurement."""
    if value < 10:
        return round(value)
    digits = len(str(int(value))) - 2
    return int(round(value / 10**digits) * 10**digits)

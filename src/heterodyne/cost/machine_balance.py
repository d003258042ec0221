"""The machine balance of a device: FLOPs in the time in which its memory moves a byte.

An op takes the longer of its FLOPs and its memory traffic (Williams, Waterman and Patterson, "Roofline", CACM 2009). This only divides
the measured seconds of a block over its ops.
"""

from __future__ import annotations

from typing import Final

from heterodyne.cluster.catalog import find
from heterodyne.cluster.spec import Device
from heterodyne.plan.precision import Precision

__all__ = ["flops_per_byte"]

_CPU: Final = 8.0
"""A core with AVX2 or AVX-512 does 50 to 200 GFLOP/s in fp32, and has 10 to 20 GB/s of memory bandwidth."""

_OTHERS: Final = 60.0
_PEAKS: Final = {"fp32": ("fp32", "tf32"), "bf16": ("bf16", "fp16", "fp32"), "fp16": ("fp16", "bf16", "fp32")}


def flops_per_byte(device: Device, precision: Precision) -> float:
    """From the datasheet where the catalog has one."""
    known = None if device.backend == "cpu" else find(device.kind)
    if known is not None and known.memory_bandwidth_bytes_per_s:
        peak = next((known.peak_flops[p] for p in _PEAKS[precision] if p in known.peak_flops), None)
        if peak is not None:
            return peak / known.memory_bandwidth_bytes_per_s
    return _CPU if device.backend == "cpu" else _OTHERS

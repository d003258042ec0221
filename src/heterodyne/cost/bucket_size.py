"""The best size of gradient buckets for the links of a cluster."""

from __future__ import annotations

import math

from heterodyne.cost.collective import Collectives
from heterodyne.errors import MeasureError
from heterodyne.graph.ir import ModelGraph

__all__ = ["bucket_bytes_for"]

_UNKNOWN = 4 * 2**20


def bucket_bytes_for(graph: ModelGraph, collectives: Collectives) -> int:
    """Bytes of a bucket with which an all-reduce over all devices costs least.

    G bytes of gradients in buckets of n bytes pay the latency a of an all-reduce G / n times. All buckets but the last overlap with the
    backward, and the last takes n b, at b seconds per byte. The sum is least at n = sqrt(a G / b). Where nothing is known of a link it
    is 4 MiB.
    """
    gradients = sum(p.bytes for p in graph.parameters if p.trainable)
    devices = [device.id for device in collectives.cluster.devices]
    try:
        cost = collectives.all_reduce(devices)
    except MeasureError:
        return _UNKNOWN
    if not cost.s_per_byte or not cost.latency_s:
        return _UNKNOWN
    return max(1, round(min(float(gradients), math.sqrt(cost.latency_s * gradients / cost.s_per_byte))))

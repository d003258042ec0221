"""Seconds of collectives over islands: what their programs (`heterodyne.plan.islands`) move over each link."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

from heterodyne.cluster.catalog import collectives_of, find
from heterodyne.cluster.spec import Cluster, Device
from heterodyne.plan.islands import Program, all_gather, all_reduce, passed, shares_by_link

__all__ = ["gathered", "islands_of", "reduced", "uplink"]

_ELEMENTS = 2**20


def islands_of(cluster: Cluster, devices: Sequence[str]) -> list[list[str]]:
    """Return the devices that reach each other by something faster than others: those of one library, CPU workers of one host.

    Nothing if that makes no difference: there is one island, or each has one device.
    """
    found: dict[object, list[str]] = {}
    for name in devices:
        device = cluster.device(name)
        found.setdefault(device.node if device.backend == "cpu" else (_library(device),), []).append(name)
    return list(found.values()) if 1 < len(found) < len(devices) else []


def uplink(nodes: Sequence[str], s_per_byte: Sequence[float]) -> float:
    """Return the seconds of a byte that an island sends to others: each of its devices sends as much, over the link of its node.

    Args:
        nodes: of each device. ``s_per_byte``: of its link.
    """
    return max(nodes.count(node) * byte_s for node, byte_s in zip(nodes, s_per_byte, strict=True)) / len(nodes)


def reduced(s_per_byte: Sequence[float]) -> float:
    """Return the seconds in which an all-reduce moves a byte over the slowest of the links of the islands."""
    bandwidths = [1 / each for each in s_per_byte]
    return _slowest(all_reduce(_alone(bandwidths), _ELEMENTS, shares_by_link(bandwidths), _ELEMENTS), s_per_byte)


def gathered(s_per_byte: Sequence[float], shares: Sequence[int]) -> float:
    """Return the seconds in which an all-gather or a reduce-scatter moves a byte of everything. ``shares``: of each island."""
    ends = [round(_ELEMENTS * reached / sum(shares)) for reached in accumulate(shares, initial=0)]
    bandwidths = [1 / each for each in s_per_byte]
    return _slowest(all_gather(_alone(bandwidths), list(pairwise(ends)), _ELEMENTS, bandwidths), s_per_byte)


def _alone(islands: Sequence[float]) -> list[list[int]]:
    """Return islands of one place each: what passes their links is the same, however many ranks they have."""
    return [[number] for number in range(len(islands))]


def _slowest(program: Program, s_per_byte: Sequence[float]) -> float:
    moved = passed(program, _alone(s_per_byte))
    return max(max(each) / _ELEMENTS * byte_s for each, byte_s in zip(moved, s_per_byte, strict=True))


def _library(device: Device) -> str:
    known = find(device.kind)
    return collectives_of(device.backend) if known is None else known.collectives

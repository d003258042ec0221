"""Seconds of collectives over islands: what their programs (`heterodyne.plan.islands`) move over each link."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

from heterodyne.cluster.catalog import library_of
from heterodyne.cluster.spec import Cluster
from heterodyne.plan.islands import Program, Range, all_gather, all_reduce, passed, shares_by_link

__all__ = ["ELEMENTS", "gathered", "islands_of", "reduced", "shared_out"]

ELEMENTS = 2**20
"""Of a collective whose steps are counted; what they move is in proportion."""


def islands_of(cluster: Cluster, devices: Sequence[str]) -> list[list[str]]:
    """Return the devices that reach each other by something faster than others: those of one library, CPU workers of one host.

    Nothing if that makes no difference: there is one island, or each has one device.
    """
    found: dict[object, list[str]] = {}
    for name in devices:
        device = cluster.device(name)
        key = device.node if device.backend == "cpu" else (library_of(device.kind, device.backend),)
        found.setdefault(key, []).append(name)
    return list(found.values()) if 1 < len(found) < len(devices) else []


def reduced(bandwidths: Sequence[float]) -> float:
    """Return the seconds of a byte of an all-reduce over islands with links of these bandwidths."""
    return _slowest(all_reduce(_alone(bandwidths), ELEMENTS, shares_by_link(bandwidths), ELEMENTS), bandwidths)


def gathered(bandwidths: Sequence[float], shares: Sequence[int]) -> float:
    """Return the seconds of a byte of an all-gather or a reduce-scatter. ``shares``: of what is gathered, of each island."""
    return _slowest(all_gather(_alone(bandwidths), shared_out(shares), ELEMENTS, bandwidths), bandwidths)


def shared_out(shares: Sequence[int]) -> list[Range]:
    """Return `ELEMENTS` in ranges in proportion to the shares."""
    return list(pairwise(round(ELEMENTS * reached / sum(shares)) for reached in accumulate(shares, initial=0)))


def _alone(islands: Sequence[float]) -> list[list[int]]:
    """Return islands of one place each: what passes their links is the same, however many ranks they have."""
    return [[number] for number in range(len(islands))]


def _slowest(program: Program, bandwidths: Sequence[float]) -> float:
    moved = passed(program, _alone(bandwidths))
    return max(max(each) / ELEMENTS / bandwidth for each, bandwidth in zip(moved, bandwidths, strict=True))

"""Which device keeps the state of which elements, where those that hold the same weights share it out (ZeRO, Rajbhandari et al., SC 2020).

A bucket is one flat range of elements, parameter after parameter. Its owners cut it into consecutive ranges, as long as their shares
are large; a share of zero gives an empty range. So a device reduces, updates and gathers one range of each bucket, and what it keeps of a
parameter is one range of that. Every rank, and the simulator, must cut alike, so this is a pure function.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import NamedTuple

from heterodyne.graph.ir import ModelGraph
from heterodyne.plan.boxes import numel
from heterodyne.plan.buckets import Bucket, BucketPart
from heterodyne.plan.plan import Plan

__all__ = [
    "Cut",
    "Range",
    "ShardedBucket",
    "StateSlice",
    "cut_by_shares",
    "cut_tensors",
    "sharded_bucket",
    "state_shares",
]

Range = tuple[int, int]
"""Elements ``[start, stop)``."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StateSlice:
    """Elements ``[start, stop)`` of a part of a parameter, row after row, whose optimizer state ``owner`` keeps; ``first``: where they
    begin in the bucket."""

    part: BucketPart
    start: int
    stop: int
    owner: str
    first: int


@dataclass(frozen=True, kw_only=True)
class ShardedBucket:
    """``ranges``: of the bucket, by owner; they do not overlap, and are all of it. ``slices``: the same, parameter by parameter."""

    ranges: Mapping[str, Range]
    slices: tuple[StateSlice, ...]

    def of(self, owner: str) -> Mapping[str, Range]:
        """For each parameter of which the owner keeps the state of anything, which elements."""
        return {slice.part.name: (slice.start, slice.stop) for slice in self.slices if slice.owner == owner}


def state_shares(plan: Plan) -> dict[str, int]:
    """Return the share of each device of the plan; only ratios between devices that hold the same weights count. 1 where nothing is
    said.
    """
    found: dict[str, int] = {}
    for pipeline in plan.pipelines:
        for stage in pipeline.stages:
            for device, share in zip(stage.devices, stage.state_shares or (1,) * len(stage.devices), strict=True):
                found[device] = max(share, found.get(device, 0))
    return found


def cut_by_shares(elements: int, shares: Sequence[int]) -> tuple[Range, ...]:
    """Consecutive ranges of so many elements, each as long as its share, to less than one element; equal ones if all shares are 0."""
    shares = shares if sum(shares) else [1] * len(shares)
    total = sum(shares)
    return tuple(pairwise([0, *(elements * upto // total for upto in accumulate(shares))]))


def sharded_bucket(
    bucket: Bucket, graph: ModelGraph, shares: Mapping[str, int], *, whole_weights: bool = False
) -> ShardedBucket:
    """Return how the owners of a bucket share it out. ``whole_weights``: no parameter is cut, each goes to the owner of its middle
    element."""
    shapes = {parameter.name: parameter.shape for parameter in graph.parameters}
    sizes = [numel(part.box, shapes[part.name]) for part in bucket.parts]
    ranges, cuts = cut_tensors(sizes, [shares.get(owner, 1) for owner in bucket.owners], whole_weights=whole_weights)
    slices = [
        StateSlice(
            part=bucket.parts[cut.tensor],
            start=cut.start,
            stop=cut.stop,
            owner=bucket.owners[cut.owner],
            first=cut.first,
        )
        for cut in cuts
    ]
    return ShardedBucket(ranges=dict(zip(bucket.owners, ranges, strict=True)), slices=tuple(slices))


class Cut(NamedTuple):
    """Elements ``[start, stop)`` of a ``tensor``, by its index, that the ``owner``-th share has; ``first``: where they begin among all."""

    owner: int
    tensor: int
    start: int
    stop: int
    first: int


def cut_tensors(
    sizes: Sequence[int], shares: Sequence[int], *, whole_weights: bool = False
) -> tuple[list[Range], list[Cut]]:
    """Return how tensors of so many elements, one after the other, are shared out: the range of each share, and the parts of tensors in
    it. ``whole_weights``: no tensor is cut.
    """
    starts = list(accumulate(sizes, initial=0))
    ranges = list(cut_by_shares(starts[-1], shares))
    if whole_weights:
        ranges = _at_borders(ranges, starts)
    return ranges, [
        Cut(owner, tensor, max(low, first) - first, min(high, stop) - first, max(low, first))
        for owner, (low, high) in enumerate(ranges)
        for tensor, (first, stop) in enumerate(pairwise(starts))
        if max(low, first) < min(high, stop)
    ]


def _at_borders(ranges: Sequence[Range], starts: Sequence[int]) -> list[Range]:
    """The same with each cut moved to the nearest border between parameters; the owner of the middle of a parameter gets all of it."""
    cuts = [min(starts, key=lambda border: (abs(border - high), border)) for _, high in ranges]
    return list(pairwise([0, *cuts]))

"""Which samples of a micro-batch each device of a stage takes."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from heterodyne.graph.sharding.dealing import dealt

__all__ = ["overlap", "slices"]


def slices(size: int, shares: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """``(first sample, count)`` for each share, contiguous, in order, covering ``size`` samples; a count may be 0.

    As `dealt` has it: nobody is more than one sample away from its due. Raises ValueError for shares that are negative or all 0.
    """
    counts = dealt(size, shares)
    return tuple(zip(accumulate(counts, initial=0), counts, strict=False))


def overlap(a: tuple[int, int], b: tuple[int, int]) -> tuple[int, int]:
    """``(first sample, count)`` of what two slices have in common; count 0 where that is nothing."""
    first = max(a[0], b[0])
    return first, max(0, min(a[0] + a[1], b[0] + b[1]) - first)

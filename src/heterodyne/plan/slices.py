"""Which samples of a micro-batch each device of a stage takes."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

__all__ = ["overlap", "slices"]


def slices(size: int, shares: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """``(first sample, count)`` for each share, contiguous, in order, covering ``size`` samples; a count may be 0.

    The borders are the exact ones of the cumulative shares, rounded (halves upwards), so no device is more than one sample away
    from its due, and what is cut for 2:1:1 has a border in common with what is cut for 1:1. Only ratios count.
    Raises ValueError for shares that are negative or all 0.
    """
    total = sum(shares)
    if total <= 0 or min(shares) < 0:
        raise ValueError(f"shares must not be negative, and one of them must be positive: {tuple(shares)}")
    borders = [(2 * size * reached + total) // (2 * total) for reached in accumulate(shares, initial=0)]
    return tuple((low, high - low) for low, high in pairwise(borders))


def overlap(a: tuple[int, int], b: tuple[int, int]) -> tuple[int, int]:
    """``(first sample, count)`` of what two slices have in common; count 0 where that is nothing."""
    first = max(a[0], b[0])
    return first, max(0, min(a[0] + a[1], b[0] + b[1]) - first)

"""Array types, prefix sums over layers and tables over pairs of layers."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

__all__ = ["Floats", "Ints", "between", "largest", "sums"]

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


def sums(values: Sequence[float]) -> list[float]:
    """Prefix sums, starting with 0."""
    return list(accumulate(values, initial=0.0))


def between(sums: Sequence[float]) -> Floats:
    """The difference of two prefix sums for every start and stop. Shape [n, n]."""
    row = np.asarray(sums)
    difference: Floats = row[None, :] - row[:, None]
    return difference


def largest(values: Sequence[float]) -> Floats:
    """For every start and stop the largest value between them."""
    count = len(values)
    square = np.where(np.arange(count)[:, None] <= np.arange(count)[None, :], np.asarray(values, float)[None, :], 0.0)
    found = np.zeros((count + 1, count + 1))
    found[:count, 1:] = np.maximum.accumulate(square, axis=1)
    return found

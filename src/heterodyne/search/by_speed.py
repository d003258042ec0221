"""Shares of devices that work on one thing together, by their speeds."""

from __future__ import annotations

from collections.abc import Sequence
from math import gcd, inf
from typing import Final

__all__ = ["shares_by", "shares_of"]

_FINE: Final = 60
"""Shares are written in about so many parts: finer than that no measurement is."""


def shares_of(rates: Sequence[float], units: int) -> tuple[int, ...]:
    """Whole numbers that add up to ``units``, at least 1 each, such that the slowest of them is done soonest."""
    shares = [1] * len(rates)
    for _ in range(units - len(rates)):
        shares[min(range(len(rates)), key=lambda i: ((shares[i] + 1) / rates[i] if rates[i] > 0 else inf, i))] += 1
    return tuple(shares)


def shares_by(rates: Sequence[float]) -> tuple[int, ...]:
    """Small whole numbers in proportion to rates, none of them 0; equal ones where no rate is known.

    >>> shares_by([0.8, 0.4, 0.4])
    (2, 1, 1)
    """
    if not any(rate > 0 for rate in rates):
        return (1,) * len(rates)
    shares = shares_of(rates, max(_FINE, len(rates)))
    common = gcd(*shares)
    return tuple(share // common for share in shares)

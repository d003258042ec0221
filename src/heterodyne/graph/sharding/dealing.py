"""Who gets how many of a number of units, by unequal shares."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from math import inf
from typing import Final

__all__ = ["dealt", "dealt_by_speed", "dealt_to_all", "halved"]

_EIGHT: Final = 8


def dealt(units: int, shares: Sequence[int]) -> tuple[int, ...]:
    """Return how many units each share takes, contiguous, in order; a count may be 0.

    The borders are the exact ones of the cumulative shares, rounded (halves upwards), so nobody is more than one unit away
    from its due, and what is cut for 2:1:1 has a border in common with what is cut for 1:1. Only ratios count.
    Raises ValueError for shares that are negative or all 0.
    """
    total = sum(shares)
    if total <= 0 or min(shares) < 0:
        raise ValueError(f"shares must not be negative, and one of them must be positive: {tuple(shares)}")
    borders = [(2 * units * reached + total) // (2 * total) for reached in accumulate(shares, initial=0)]
    return tuple(high - low for low, high in pairwise(borders))


def dealt_to_all(units: int, shares: Sequence[int]) -> tuple[int, ...]:
    """The same, but where there are units for all, no one with a share goes without.

    Where there are many, they are dealt out by eights, which kernels like.
    """
    if units % _EIGHT == 0 and units >= 4 * _EIGHT * len(shares):
        return tuple(_EIGHT * count for count in dealt_to_all(units // _EIGHT, shares))
    counts = list(dealt(units, shares))
    takers = [place for place, share in enumerate(shares) if share > 0]
    if units >= len(takers):
        for place in takers:
            if counts[place] == 0:
                several = [taker for taker in takers if counts[taker] > 1]
                counts[max(several, key=lambda p: counts[p] * sum(shares) - units * shares[p])] -= 1
                counts[place] = 1
    return tuple(counts)


def dealt_by_speed(rates: Sequence[float], units: int) -> tuple[int, ...]:
    """Counts that sum to ``units``, such that the slowest is done soonest; at least 1 for each, or for the fastest, where units are few.

    What each does in the time in which all together do the units is given at once; the rest goes, one by one, to whoever has it done first.
    """
    places, total = range(len(rates)), sum(rates)
    if units < len(rates):
        fastest = sorted(places, key=lambda place: (-rates[place], place))[:units]
        return tuple(int(place in fastest) for place in places)
    counts = [max(1, int(units * rate / total)) if total else 1 for rate in rates]
    counts = counts if sum(counts) <= units else [1] * len(rates)
    for _ in range(units - sum(counts)):
        counts[min(places, key=lambda i: ((counts[i] + 1) / rates[i] if rates[i] > 0 else inf, i))] += 1
    return tuple(counts)


def halved(samples: int) -> tuple[int, ...]:
    """The sizes of the halves of a micro-batch that runs as two in turns; of one sample there is one."""
    return (samples - samples // 2, samples // 2) if samples > 1 else (samples,)

"""Shares of a batch for unequal devices: the smallest possible time of the slowest, exactly.

Given for each device how long it takes for any number of samples, find whole numbers n_i with sum n_i = G that minimise
max_i T_i(n_i). Whale (Jia et al., ATC 2022, algorithm 1) moves load from the fullest device to the emptiest one, on peak FLOP/s
and on memory in proportion to the share; here T_i is any non-decreasing measured function, and memory has already
decided how far each table reaches. The optimum is found by a search for the threshold, not by moving load about.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from heterodyne.errors import InfeasibleError

__all__ = ["Balance", "balance"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Balance:
    """Shares in samples, the time of the slowest device, and the sum of the times."""

    shares: tuple[int, ...]
    longest_s: float
    total_s: float


def balance(tables: Sequence[Sequence[float]], samples: int, least: Sequence[int] | None = None) -> Balance:
    """Shares of ``samples`` with the least longest time; among those the least total time; then the larger shares first.

    Args:
        tables: ``tables[i][k]``: seconds of device i for ``least[i] + k`` samples, non-decreasing in k; a device takes no more
            samples than its table has entries for.
        samples: what the shares add up to.
        least: the fewest samples of each device; zeros by default.

    Raises InfeasibleError if the tables do not reach that far, or ``least`` asks for more; ValueError for a table that falls.
    """
    base = list(least) if least is not None else [0] * len(tables)
    for number, table in enumerate(tables):
        if not table or any(later < earlier for earlier, later in pairwise(table)):
            raise ValueError(f"table {number} is empty or falls: more samples cannot take less time")
    rest = samples - sum(base)
    reach = sum(len(table) - 1 for table in tables)
    if not 0 <= rest <= reach:
        raise InfeasibleError(
            f"the devices take {sum(base)} to {sum(base) + reach} samples together, the global batch has {samples}"
        )
    limit = _threshold(tables, rest)
    most = [bisect_right(table, limit) - 1 for table in tables]
    fewer = _give_back(tables, most, sum(most) - rest)
    extra = [have - less for have, less in zip(most, fewer, strict=True)]
    times = [table[k] for table, k in zip(tables, extra, strict=True)]
    return Balance(
        shares=tuple(low + k for low, k in zip(base, extra, strict=True)),
        longest_s=max(times, default=0.0),
        total_s=sum(times),
    )


def _threshold(tables: Sequence[Sequence[float]], rest: int) -> float:
    """The least value of any table within which all devices together take ``rest`` samples beyond their least."""
    floor = max((table[0] for table in tables), default=0.0)  # what nobody can avoid
    values = sorted({value for table in tables for value in table if value >= floor})
    low, high = 0, len(values) - 1
    while low < high:
        middle = (low + high) // 2
        taken = sum(bisect_right(table, values[middle]) - 1 for table in tables)
        low, high = (low, middle) if taken >= rest else (middle + 1, high)
    return values[low] if values else 0.0


def _give_back(tables: Sequence[Sequence[float]], most: Sequence[int], surplus: int) -> list[int]:
    """How many samples fewer than it could take each device gets, so that the total time is least (min-plus knapsack).

    The threshold leaves room only through ties, so the surplus is small: a number of devices, or the length of a plateau.
    """
    best: list[tuple[float, tuple[int, ...]]] = [(0.0, ())]  # by surplus that is already given back
    for table, have in zip(tables, most, strict=True):
        options: list[tuple[float, tuple[int, ...]]] = []
        for total in range(min(surplus, len(best) - 1 + have) + 1):
            first = max(0, total - (len(best) - 1))
            options.append(
                min(
                    (best[total - less][0] + table[have - less], (*best[total - less][1], less))
                    for less in range(first, min(have, total) + 1)
                )
            )
        best = options
    return list(best[surplus][1])

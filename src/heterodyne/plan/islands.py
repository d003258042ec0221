"""All-reduce over islands: ranks that reach each other by something fast, joined by links that are slow.

An island is the devices of one maker that its own library joins, or the CPU workers of one host. Inside each island ranks reduce-scatter,
so each has the sums of its island over a range. Islands then exchange: each element has a home island, to which the others send their
sums of it, and which sends the total back. At last ranks all-gather inside. Over the link of island i, whose share of homes is f_i, pass

    N (1 + (G - 2) f_i)

bytes each way, of N in all and G islands; a ring over R ranks passes 2 N (R - 1) / R over each link that it crosses, in each direction
that it crosses it.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

__all__ = ["Range", "Segment", "homes_of", "inside_ranges", "segments_of", "shares_by_link"]

Range = tuple[int, int]
"""Elements ``[start, stop)`` of a flat tensor."""


class Segment(NamedTuple):
    """Elements ``[start, stop)`` of which the ``holders``, one rank of each island, have the sums of their islands; the one of the island
    ``home`` adds them up."""

    start: int
    stop: int
    home: int
    holders: tuple[int, ...]


def shares_by_link(bandwidths: Sequence[float]) -> tuple[float, ...]:
    """Return which share of the homes each island has, so that the slowest link is done soonest:

        f_i = clamp((T b_i / N - 1) / (G - 2), 0, 1)

    T is the least time with which the shares add up to 1. Of two islands every division takes as long: they have one half each.
    """
    islands = len(bandwidths)
    if islands < 3:
        return (1 / islands,) * islands

    def shares(time: float) -> list[float]:
        return [min(1.0, max(0.0, (time * b - 1) / (islands - 2))) for b in bandwidths]

    low, high = 0.0, islands / min(bandwidths)  # with N = 1
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (low, middle) if sum(shares(middle)) >= 1 else (middle, high)
    found = shares(high)
    return tuple(each / sum(found) for each in found)


def homes_of(elements: int, shares: Sequence[float]) -> list[Range]:
    """Return the range whose home each island is."""
    borders = [round(elements * min(1.0, reached)) for reached in accumulate(shares)]
    return list(pairwise([0, *borders[:-1], elements]))


def segments_of(islands: Sequence[Sequence[int]], homes: Sequence[Range], most: int) -> list[Segment]:
    """Return the elements in segments of at most so many, in the order in which they are exchanged: the same on all ranks.

    The parts of all holders go on at the same time, so that one is sent back while others are on their way.

    Args:
        islands: the ranks of each.
        homes: the range whose home each is.
    """
    elements = homes[-1][1]
    held = [inside_ranges(elements, len(ranks)) for ranks in islands]
    borders = sorted({0, elements, *(stop for ranges in (*held, homes) for _, stop in ranges)})
    found: list[tuple[int, Segment]] = []
    for low, high in pairwise(borders):
        holders = tuple(
            next(rank for rank, (_, stop) in zip(ranks, ranges, strict=True) if low < stop)
            for ranks, ranges in zip(islands, held, strict=True)
        )
        home = next(number for number, (_, stop) in enumerate(homes) if low < stop)
        pieces = -(-(high - low) // most)
        cuts = [low + (high - low) * piece // pieces for piece in range(pieces + 1)]
        found += [(turn, Segment(*cut, home, holders)) for turn, cut in enumerate(pairwise(cuts))]
    return [segment for _, segment in sorted(found)]


def inside_ranges(elements: int, ranks: int) -> list[Range]:
    """Return the range that each rank of an island reduces, exchanges and gathers."""
    return list(pairwise([elements * place // ranks for place in range(ranks + 1)]))

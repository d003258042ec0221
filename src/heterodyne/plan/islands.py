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

__all__ = ["Message", "Range", "homes_of", "messages_of", "shares_by_link"]

Range = tuple[int, int]
"""Elements ``[start, stop)`` of a flat tensor."""


class Message(NamedTuple):
    """Elements ``[start, stop)`` that one rank sends another: the sums of its ``island``, or the total if that is the island's home."""

    sender: int
    receiver: int
    start: int
    stop: int
    island: int


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


def messages_of(islands: Sequence[Sequence[int]], homes: Sequence[Range]) -> tuple[list[Message], list[Message]]:
    """Return what is sent to the homes, and what the homes send back, in one order for all ranks.

    Args:
        islands: the ranks of each.
        homes: the range whose home each is.
    """
    held = [dict(zip(ranks, inside_ranges(homes[-1][1], len(ranks)), strict=True)) for ranks in islands]
    there: list[Message] = []
    back: list[Message] = []
    for number, of in enumerate(held):
        for home, (start, stop) in enumerate(homes):
            if home == number:
                continue
            for rank, (low, high) in of.items():
                for other, (first, last) in held[home].items():
                    begin, end = max(start, low, first), min(stop, high, last)
                    if begin < end:
                        there.append(Message(rank, other, begin, end, number))
                        back.append(Message(other, rank, begin, end, home))
    return there, back


def inside_ranges(elements: int, ranks: int) -> list[Range]:
    """Return the range that each rank of an island reduces, exchanges and gathers."""
    return list(pairwise([elements * place // ranks for place in range(ranks + 1)]))

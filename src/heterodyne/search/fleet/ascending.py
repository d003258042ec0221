"""Lazy selection in ascending order, where a lower bound is cheap and the exact value is expensive."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from heapq import heapify, heappop, heappush
from typing import TypeVar

__all__ = ["ascending"]

Item = TypeVar("Item")


def ascending(
    items: Iterable[Item], least: Callable[[Item], float], more: Callable[[Item], float], below: float
) -> Iterator[Item]:
    """Items in ascending order of ``least + more``, as far as that is below the limit; ties keep their input order.

    ``least`` is a lower bound and ``more``, which is never negative, is evaluated only for items that may be next (best-first search).
    """
    known = list(items)
    heap = [(value, number, False) for number, item in enumerate(known) if (value := least(item)) < below]
    heapify(heap)
    while heap:
        value, number, whole = heappop(heap)
        if whole:
            yield known[number]
        elif (value := value + more(known[number])) < below:
            heappush(heap, (value, number, True))

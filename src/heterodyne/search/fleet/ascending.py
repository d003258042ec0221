"""The least first, where a first look says little and a second one takes long."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from heapq import heapify, heappop, heappush
from typing import TypeVar

__all__ = ["ascending"]

Item = TypeVar("Item")


def ascending(
    items: Iterable[Item], least: Callable[[Item], float], more: Callable[[Item], float], below: float
) -> Iterator[Item]:
    """By ``least + more``, those where it is below a limit; of equals the earlier one first.

    ``more`` is never less than zero. It is asked only of those that may be next.
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

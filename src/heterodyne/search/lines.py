"""In which order devices form a pipeline: the lines that are worth drawing.

Devices of one class in one node are interchangeable (``kinds``: for each device a number, the same for those), so lines that differ
only by which of them stands where are one line. Up to five devices every order is listed; beyond that the orders that usually win,
from which swaps go on.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations, permutations
from typing import TypeAlias

__all__ = ["Line", "groupings", "orders", "swaps"]

_ALL_ORDERS = 5

Line: TypeAlias = tuple[str, ...]
"""Devices, the first stage's first."""


def orders(
    devices: Sequence[str], kinds: Mapping[str, int], memory: Mapping[str, int], rate: Mapping[str, float]
) -> list[Line]:
    """Orders of the devices, larger memory first at the head, since early stages hold more activations."""
    by_memory = sorted(devices, key=lambda d: (-memory[d], -rate[d]))
    by_rate = sorted(devices, key=lambda d: -rate[d])
    found: dict[tuple[int, ...], Line] = {}
    for order in (by_memory, by_rate, by_rate[::-1], devices, devices[::-1]):
        found.setdefault(tuple(kinds[d] for d in order), tuple(order))
    for line in permutations(by_memory) if len(devices) <= _ALL_ORDERS else ():
        found.setdefault(tuple(kinds[d] for d in line), line)
    return list(found.values())


def swaps(line: Line, kinds: Mapping[str, int]) -> Iterator[Line]:
    """Lines in which two devices have changed their places, neighbours first."""
    for a, b in sorted(combinations(range(len(line)), 2), key=lambda pair: pair[1] - pair[0]):
        if kinds[line[a]] != kinds[line[b]]:
            changed = list(line)
            changed[a], changed[b] = line[b], line[a]
            yield tuple(changed)


def groupings(devices: Sequence[str], kinds: Mapping[str, int]) -> list[tuple[str, ...]]:
    """All devices, and all but one of each kind."""
    without = {kinds[left]: tuple(d for d in devices if d != left) for left in devices} if len(devices) > 2 else {}
    return [tuple(devices), *without.values()]

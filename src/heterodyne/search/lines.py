"""Which devices form a pipeline, and in which order: the lines that are worth drawing.

Devices of one class in one node are interchangeable (``kinds``: for each device a number, the same for those), so lines that differ
only by which of them stands where are one line. Up to five devices every order is listed; beyond that the orders that usually win,
from which swaps go on.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, groupby, pairwise, permutations

from heterodyne.search.by_speed import shares_of

__all__ = ["Line", "Place", "groupings", "orders", "partitions", "swaps", "wide_lines"]

_ALL_ORDERS = 5
_ALL_PARTITIONS = 5


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """A group of devices with their shares of each micro-batch (only ratios count)."""

    devices: tuple[str, ...]
    shares: tuple[int, ...] = (1,)


Line = tuple[Place, ...]


def orders(
    devices: Sequence[str], kinds: Mapping[str, int], memory: Mapping[str, int], rate: Mapping[str, float]
) -> list[Line]:
    """Orders of the devices, larger memory first at the head, since early stages hold more activations."""
    by_memory = sorted(devices, key=lambda d: (-memory[d], -rate[d]))
    by_rate = sorted(devices, key=lambda d: -rate[d])
    seeds: list[Sequence[str]] = [by_memory, by_rate, by_rate[::-1], list(devices), list(devices)[::-1]]
    every = permutations(by_memory) if len(devices) <= _ALL_ORDERS else iter(())
    return list(_distinct((*seeds, *every), kinds))


def swaps(line: Line, kinds: Mapping[str, int]) -> Iterator[Line]:
    """Lines in which two places have changed their position, neighbours first."""
    for a, b in sorted(combinations(range(len(line)), 2), key=lambda pair: pair[1] - pair[0]):
        if _signature(line[a : a + 1], kinds) != _signature(line[b : b + 1], kinds):
            changed = list(line)
            changed[a], changed[b] = line[b], line[a]
            yield tuple(changed)


def wide_lines(line: Line, kinds: Mapping[str, int], rate: Mapping[str, float], units: int) -> list[Line]:
    """Lines in which some places hold several devices: all alike ones together, alike ones in pairs, the two slowest together.

    ``units``: samples of a micro-batch; a place has no more devices than that. Shares are as the rates, in whole samples.
    """
    devices = [place.devices[0] for place in line]
    alike = [list(group) for _, group in groupby(sorted(devices, key=lambda d: kinds[d]), key=lambda d: kinds[d])]
    pairs = [group[first : first + 2] for group in alike for first in range(0, len(group), 2)]
    slowest = sorted(devices, key=lambda d: rate[d])[:2]
    found = []
    for groups in (alike, pairs, [slowest, *([d] for d in devices if d not in slowest)]):
        if not 1 < len(groups) < len(devices) or max(map(len, groups)) > units:
            continue
        ordered = sorted(groups, key=lambda group: min(map(devices.index, group)))
        found.append(tuple(Place(devices=tuple(g), shares=shares_of([rate[d] for d in g], units)) for g in ordered))
    return list(dict.fromkeys(found))


def groupings(devices: Sequence[str], kinds: Mapping[str, int]) -> list[tuple[str, ...]]:
    """All devices, and all but one of each kind."""
    without = {kinds[left]: tuple(d for d in devices if d != left) for left in devices} if len(devices) > 2 else {}
    return [tuple(devices), *without.values()]


def partitions(
    devices: Sequence[str], kinds: Mapping[str, int], rate: Mapping[str, float], nodes: Mapping[str, str]
) -> list[tuple[tuple[str, ...], ...]]:
    """Ways to form two or more groups, at least one of them of several devices.

    Of up to five devices every way; of more: by node, by kind, runs of neighbours, and groups that are about as fast as each other.
    """
    if len(devices) <= _ALL_PARTITIONS:
        every: Iterable[Sequence[Sequence[str]]] = _set_partitions(list(devices))
    else:
        every = _likely_partitions(devices, kinds, rate, nodes)
    found: dict[object, tuple[tuple[str, ...], ...]] = {}
    for groups in every:
        if 1 < len(groups) < len(devices):
            made = tuple(tuple(sorted(group, key=devices.index)) for group in groups)
            found.setdefault(tuple(sorted(tuple(sorted(kinds[d] for d in group)) for group in made)), made)
    return list(found.values())


def _set_partitions(devices: list[str]) -> Iterator[list[list[str]]]:
    if not devices:
        yield []
        return
    for rest in _set_partitions(devices[1:]):
        yield [[devices[0]], *rest]
        for number, group in enumerate(rest):
            yield [*rest[:number], [devices[0], *group], *rest[number + 1 :]]


def _likely_partitions(
    devices: Sequence[str], kinds: Mapping[str, int], rate: Mapping[str, float], nodes: Mapping[str, str]
) -> Iterator[list[list[str]]]:
    for key in (nodes, kinds):
        yield [[d for d in devices if key[d] == value] for value in dict.fromkeys(key[d] for d in devices)]
    by_rate = sorted(devices, key=lambda d: -rate[d])
    for count in range(2, len(devices) // 2 + 1):
        size, more = divmod(len(devices), count)
        starts = [number * size + min(number, more) for number in range(count + 1)]
        yield [list(devices[a:b]) for a, b in pairwise(starts)]
        even: list[list[str]] = [[] for _ in range(count)]
        for device in by_rate:  # the next one to the group that is slowest so far
            min(even, key=lambda group: (sum(rate[d] for d in group), len(group))).append(device)
        yield even


def _distinct(all_orders: Iterable[Sequence[str]], kinds: Mapping[str, int]) -> Iterator[Line]:
    seen = set()
    for order in all_orders:
        signature = tuple(kinds[d] for d in order)
        if signature not in seen:
            seen.add(signature)
            yield tuple(Place(devices=(d,)) for d in order)


def _signature(line: Line, kinds: Mapping[str, int]) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(kinds[d] for d in place.devices) for place in line)

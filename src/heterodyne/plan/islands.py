"""Collectives over islands: ranks that reach each other by something fast, joined by links that are slow.

An island is the devices of one maker that its own library joins, or the CPU workers of one host. A collective is a `Program`: what each
island adds up inside, what goes from rank to rank between islands, and what each island gathers inside. The runtime carries it out, and
the bytes that it moves over each link are what it costs and what is shown of it.

In an all-reduce each element has a home island, to which the others send the sums of theirs, and which sends the total back. Over the link
of island i, whose share of homes is f_i, pass

    N (1 + (G - 2) f_i)

bytes each way, of N in all and G islands; a ring over R ranks passes 2 N (R - 1) / R over each link that it crosses, in each direction
that it crosses it. An all-gather sends what an island has to each of the others, or along a chain of them; a reduce-scatter is an
all-gather backwards, and a broadcast is one in which one rank has everything.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate, groupby, pairwise, zip_longest
from typing import Any, NamedTuple, TypeVar

__all__ = [
    "Inside",
    "Islands",
    "Piece",
    "Program",
    "Range",
    "Transfer",
    "all_gather",
    "all_reduce",
    "backwards",
    "equal_ranges",
    "passed",
    "shares_by_link",
    "uplink",
]

Range = tuple[int, int]
"""Elements ``[start, stop)`` of a flat tensor."""
Islands = Sequence[Sequence[int]]
"""The places in the process group of the ranks of each island."""

T = TypeVar("T")
_NOTHING: Any = object()


class Inside(NamedTuple):
    """Each island reduce-scatters, or all-gathers, the elements ``[start, stop)`` among its ranks.

    Args:
        ranges: for each island, the ranges of its ranks, in their order. They are all of it, and may be empty.
    """

    start: int
    stop: int
    ranges: tuple[tuple[Range, ...], ...]


class Transfer(NamedTuple):
    """Elements ``[start, stop)`` go from one place to another, which adds them to its own, or has them in place of its own."""

    start: int
    stop: int
    source: int
    target: int
    adds: bool


class Piece(NamedTuple):
    """A part of a collective: of consecutive pieces each can be at another of the three.

    Args:
        up: reduce-scatters inside islands, before anything of theirs is sent.
        transfers: between islands. Each rank carries out its own in this order: it has received what stands before what it sends.
        down: all-gathers inside islands, when all that this rank has of them has come.
    """

    up: tuple[Inside, ...]
    transfers: tuple[Transfer, ...]
    down: tuple[Inside, ...]


Program = tuple[Piece, ...]


class _Segment(NamedTuple):
    """Elements ``[start, stop)`` that one rank of each island holds, in the order of the islands."""

    start: int
    stop: int
    home: int
    holders: tuple[int, ...]

    def sums(self) -> list[Transfer]:
        """To the home, from each of the others."""
        home = self.holders[self.home]
        return [Transfer(self.start, self.stop, each, home, adds=True) for each in self.holders if each != home]

    def totals(self) -> list[Transfer]:
        """From the home, to each of the others."""
        return [Transfer(each.start, each.stop, each.target, each.source, adds=False) for each in self.sums()]

    def along(self) -> list[Transfer]:
        """From the home, along a chain of the others."""
        chain = [*self.holders[self.home :], *self.holders[: self.home]]
        return [Transfer(self.start, self.stop, *pair, adds=False) for pair in pairwise(chain)]


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


def uplink(hosts: Sequence[str], bandwidths: Sequence[float]) -> float:
    """Return the bandwidth of an island to others: each of its ranks sends as much, over the link of its host.

    Args:
        hosts: of each rank. ``bandwidths``: of the link of its host.
    """
    return len(hosts) / max(hosts.count(host) / bandwidth for host, bandwidth in zip(hosts, bandwidths, strict=True))


def all_reduce(
    islands: Islands,
    elements: int,
    shares: Sequence[float],
    most: int,
    pieces: int = 1,
    one_link: Sequence[bool] | None = None,
) -> Program:
    """Return the steps of an all-reduce.

    Args:
        shares: of homes, of each island.
        most: elements of a message between islands.
        pieces: in how many parts it is carried out.
        one_link: of each island, whether all its ranks share one link to others: then the first sends and receives for all, since several
            would only hold each other up. None: of none.
    """
    found = []
    alone = one_link or [False] * len(islands)
    for low, high in pairwise(elements * piece // pieces for piece in range(pieces + 1)):
        held = [_held(low, high, len(ranks), one) for ranks, one in zip(islands, alone, strict=True)]
        homes = [low, *(low + round((high - low) * min(1.0, reached)) for reached in accumulate(shares))]
        segments = _segments(islands, held, list(pairwise([*homes[:-1], high])), most)
        transfers = [transfer for segment in segments for transfer in (*segment.sums(), *segment.totals())]
        inside = (Inside(low, high, tuple(held)),)
        found.append(Piece(inside, tuple(transfers), inside))
    return tuple(found)


def all_gather(
    islands: Islands,
    ranges: Sequence[Range],
    most: int,
    bandwidths: Sequence[float],
    one_link: Sequence[bool] | None = None,
) -> Program:
    """Return the steps of an all-gather of unequal ranges: directly to each island, or along a chain, whichever leaves the slowest link
    less to do.

    Args:
        ranges: of each rank, one after the other.
        bandwidths: of the link of each island, in any unit.
        one_link: see `all_reduce`.
    """
    alone = one_link or [False] * len(islands)

    def program(way: Callable[[_Segment], list[Transfer]]) -> Program:
        inside: list[Inside] = []
        runs: list[list[_Segment]] = []
        for home, low, high in _runs(islands, ranges):
            held = [
                tuple(_within(ranges[rank], low, high) for rank in ranks)
                if number == home
                else _held(low, high, len(ranks), alone[number])
                for number, ranks in enumerate(islands)
            ]
            inside.append(Inside(low, high, tuple(held)))
            homes = [(low, high) if number == home else (high, high) for number in range(len(islands))]
            runs.append(_segments(islands, held, homes, most))
        return (Piece((), tuple(transfer for segment in _in_turns(runs) for transfer in way(segment)), tuple(inside)),)

    def slowest(found: Program) -> float:
        return max(max(moved) / b for moved, b in zip(passed(found, islands), bandwidths, strict=True))

    return min((program(each) for each in (_Segment.totals, _Segment.along)), key=slowest)


def backwards(program: Program) -> Program:
    """Return the steps of a reduce-scatter, from those of the all-gather of the same ranges: each message goes back, and is added up."""
    (piece,) = program
    segments = (list(of) for _, of in groupby(piece.transfers, key=lambda transfer: transfer.start))
    back = [Transfer(t.start, t.stop, t.target, t.source, adds=True) for of in segments for t in reversed(of)]
    return (Piece(piece.down, tuple(back), ()),)


def passed(program: Program, islands: Islands) -> list[tuple[int, int]]:
    """Return the elements that each island sends to others, and those that it receives from them."""
    island_of = {rank: number for number, ranks in enumerate(islands) for rank in ranks}
    sent, received = [0] * len(islands), [0] * len(islands)
    for transfer in (each for piece in program for each in piece.transfers):
        sent[island_of[transfer.source]] += transfer.stop - transfer.start
        received[island_of[transfer.target]] += transfer.stop - transfer.start
    return list(zip(sent, received, strict=True))


def equal_ranges(low: int, high: int, ranks: int) -> tuple[Range, ...]:
    """Return the elements ``[low, high)`` in equal ranges."""
    return tuple(pairwise(low + (high - low) * place // ranks for place in range(ranks + 1)))


def _held(low: int, high: int, ranks: int, one: bool) -> tuple[Range, ...]:
    """Return what each rank of an island holds: an equal range, or the first one everything."""
    return ((low, high), *((high, high),) * (ranks - 1)) if one else equal_ranges(low, high, ranks)


def _segments(islands: Islands, held: Sequence[Sequence[Range]], homes: Sequence[Range], most: int) -> list[_Segment]:
    """Return the elements in segments of at most so many, those of all holders and homes in turns, so that all links are busy.

    Args:
        held: for each island, the ranges that its ranks hold.
        homes: the range whose home each island is.
    """
    borders = sorted({homes[0][0], *(border for ranges in (*held, homes) for own in ranges for border in own)})
    found = []
    for low, high in pairwise(borders):
        holders = tuple(
            next(rank for rank, (start, stop) in zip(ranks, ranges, strict=True) if start <= low < stop)
            for ranks, ranges in zip(islands, held, strict=True)
        )
        home = next(number for number, (start, stop) in enumerate(homes) if start <= low < stop)
        found.append([_Segment(*cut, home, holders) for cut in equal_ranges(low, high, -(-(high - low) // most))])
    return _in_turns(found)


def _in_turns(lists: Iterable[Sequence[T]]) -> list[T]:
    """Return the first of each list, then the second ones, and so on."""
    return [each for turn in zip_longest(*lists, fillvalue=_NOTHING) for each in turn if each is not _NOTHING]


def _runs(islands: Islands, ranges: Sequence[Range]) -> list[tuple[int, int, int]]:
    """Return ``(island, start, stop)`` of consecutive elements whose ranks are of one island."""
    island_of = {rank: number for number, ranks in enumerate(islands) for rank in ranks}
    filled = [(island_of[rank], *own) for rank, own in enumerate(ranges) if own[0] < own[1]]
    runs = (list(run) for _, run in groupby(filled, key=lambda each: each[0]))
    return [(run[0][0], run[0][1], run[-1][2]) for run in runs]


def _within(own: Range, low: int, high: int) -> Range:
    return (own[0], own[1]) if low <= own[0] < own[1] <= high else (low, low)

"""Programs of collectives over islands give what the collective is to give, and no link carries more than the closed form says."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from heterodyne.plan.islands import (
    Inside,
    Islands,
    Program,
    Range,
    all_gather,
    all_reduce,
    backwards,
    passed,
    shares_by_link,
)

SIZES = st.lists(st.integers(1, 5), min_size=2, max_size=5)
Values = NDArray[np.int64]


class Case(NamedTuple):
    """Ranks in any order in islands, with unequal ranges and links."""

    islands: Islands
    ranges: list[Range]
    bandwidths: list[float]
    most: int
    one_link: list[bool]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    islands = numbered(draw(SIZES))
    ranks = sum(map(len, islands))
    order = draw(st.permutations(range(ranks)))
    lengths = draw(st.lists(st.integers(0, 60), min_size=ranks, max_size=ranks).filter(any))
    ends = np.cumsum([0, *lengths]).tolist()
    bandwidths = draw(st.lists(st.floats(0.05, 20.0), min_size=len(islands), max_size=len(islands)))
    placed = [sorted(order[rank] for rank in ranks) for ranks in islands]
    one_link = draw(st.lists(st.booleans(), min_size=len(islands), max_size=len(islands)))
    return Case(placed, list(itertools.pairwise(ends)), bandwidths, draw(st.integers(1, 40)), one_link)


def numbered(sizes: list[int]) -> list[list[int]]:
    ends = np.cumsum([0, *sizes])
    return [list(range(a, b)) for a, b in itertools.pairwise(ends)]


def carried_out(program: Program, islands: Islands, values: Values) -> Values:
    """What each rank (row) has in the end; what a rank of an island does not reduce inside is lost."""
    flat = values.copy()

    def inside(step: Inside, do: Callable[[Sequence[int], Sequence[Range]], None]) -> None:
        for ranks, ranges in zip(islands, step.ranges, strict=True):
            assert sum(stop - start for start, stop in ranges) == step.stop - step.start
            do(ranks, ranges)

    def add_up(ranks: Sequence[int], ranges: Sequence[Range]) -> None:
        low, high = min(r[0] for r in ranges), max(r[1] for r in ranges)
        total = flat[list(ranks)].sum(0)
        flat[list(ranks), low:high] = -(10**9)
        for rank, (start, stop) in zip(ranks, ranges, strict=True):
            flat[rank, start:stop] = total[start:stop]

    def hand_out(ranks: Sequence[int], ranges: Sequence[Range]) -> None:
        for rank, (start, stop) in zip(ranks, ranges, strict=True):
            flat[list(ranks), start:stop] = flat[rank, start:stop]

    for piece in program:
        for step in piece.up:
            inside(step, add_up)
        for transfer in piece.transfers:
            sent = flat[transfer.source, transfer.start : transfer.stop]
            if transfer.adds:
                flat[transfer.target, transfer.start : transfer.stop] += sent
            else:
                flat[transfer.target, transfer.start : transfer.stop] = sent
        for step in piece.down:
            inside(step, hand_out)
    return flat


def random_values(ranks: int, elements: int) -> Values:
    return np.random.default_rng(elements).integers(-1000, 1000, (ranks, elements))


@given(SIZES, st.integers(0, 300), st.integers(1, 40), st.integers(1, 4), st.data())
def test_an_all_reduce_gives_each_rank_the_sums_of_all(
    sizes: list[int], elements: int, most: int, pieces: int, data: st.DataObject
) -> None:
    islands = numbered(sizes)
    drawn = data.draw(
        st.lists(st.floats(0, 1), min_size=len(sizes), max_size=len(sizes)).filter(lambda s: sum(s) > 0.1)
    )
    values = random_values(sum(sizes), elements)
    one_link = data.draw(st.lists(st.booleans(), min_size=len(sizes), max_size=len(sizes)))
    program = all_reduce(islands, elements, [share / sum(drawn) for share in drawn], most, pieces, one_link)
    assert (carried_out(program, islands, values) == values.sum(0)).all()
    assert all(0 < t.stop - t.start <= most for piece in program for t in piece.transfers)


@given(cases())
def test_an_all_gather_gives_each_rank_the_range_of_each(case: Case) -> None:
    islands, ranges, bandwidths, most, one_link = case
    values = random_values(len(ranges), ranges[-1][1])
    wanted = np.concatenate([values[rank, start:stop] for rank, (start, stop) in enumerate(ranges)])
    found = carried_out(all_gather(islands, ranges, most, bandwidths, one_link), islands, values)
    assert (found == wanted).all()


@given(cases())
def test_a_reduce_scatter_gives_each_rank_the_sums_of_its_range(case: Case) -> None:
    islands, ranges, bandwidths, most, one_link = case
    values = random_values(len(ranges), ranges[-1][1])
    found = carried_out(backwards(all_gather(islands, ranges, most, bandwidths, one_link)), islands, values)
    for rank, (start, stop) in enumerate(ranges):
        assert (found[rank, start:stop] == values[:, start:stop].sum(0)).all()


@given(cases())
def test_each_island_gets_once_what_others_have(case: Case) -> None:
    islands, ranges, bandwidths, most, one_link = case
    whole = ranges[-1][1]
    own = [sum(ranges[rank][1] - ranges[rank][0] for rank in ranks) for ranks in islands]
    gathered = passed(all_gather(islands, ranges, most, bandwidths, one_link), islands)
    assert [received for _, received in gathered] == [whole - each for each in own]
    scattered = passed(backwards(all_gather(islands, ranges, most, bandwidths, one_link)), islands)
    assert [sent for sent, _ in scattered] == [whole - each for each in own]


def test_a_broadcast_goes_along_a_chain() -> None:
    """Each link carries everything once, where sending it to each island would take the link of the source as often as there are others."""
    islands, ranges = [[0, 1], [2, 3], [4]], [(0, 0), (0, 900), (900, 900), (900, 900), (900, 900)]
    sent = [each for each, _ in passed(all_gather(islands, ranges, 100, [1.0] * 3), islands)]
    assert sent == [900, 900, 0]


@given(SIZES, st.lists(st.floats(0.1, 10.0), min_size=5, max_size=5))
def test_links_carry_what_the_closed_form_says(sizes: list[int], bandwidths: list[float]) -> None:
    islands, elements = numbered(sizes), 10_000
    shares = shares_by_link(bandwidths[: len(sizes)])
    assert sum(shares) == pytest.approx(1)
    for share, moved in zip(shares, passed(all_reduce(islands, elements, shares, 1000), islands), strict=True):
        wanted = elements * (1 + (len(islands) - 2) * share)
        assert moved == pytest.approx((wanted, wanted), abs=2 * len(islands))


def step_s(bandwidths: list[float], shares: tuple[float, ...]) -> float:
    return max((1 + (len(bandwidths) - 2) * f) / b for f, b in zip(shares, bandwidths, strict=True))


@given(st.lists(st.floats(0.05, 20.0), min_size=3, max_size=6), st.data())
def test_no_other_shares_are_faster(bandwidths: list[float], data: st.DataObject) -> None:
    best = step_s(bandwidths, shares_by_link(bandwidths))
    other = data.draw(st.lists(st.floats(0.01, 1), min_size=len(bandwidths), max_size=len(bandwidths)))
    assert best <= step_s(bandwidths, tuple(each / sum(other) for each in other)) * (1 + 1e-9)


def test_published_ideals() -> None:
    """Of islands of 3, 2 and 1 ranks: with links of 20, 40 and 80, water-filled shares are 1.33 times as fast as equal ones."""
    links = [20.0, 40.0, 80.0]
    assert step_s(links, (1 / 3,) * 3) / step_s(links, shares_by_link(links)) == pytest.approx(4 / 3)
    assert step_s(links, shares_by_link(links)) == pytest.approx(1 / 20)

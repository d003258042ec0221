"""The exchange between islands adds up everything once, and no link carries more than the closed form says."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from heterodyne.plan.islands import homes_of, inside_ranges, segments_of, shares_by_link

SIZES = st.lists(st.integers(1, 5), min_size=2, max_size=5)


def numbered(sizes: list[int]) -> list[list[int]]:
    ends = np.cumsum([0, *sizes])
    return [list(range(a, b)) for a, b in itertools.pairwise(ends)]


@given(SIZES, st.integers(0, 300), st.integers(1, 40), st.data())
def test_every_element_is_exchanged_once(sizes: list[int], elements: int, most: int, data: st.DataObject) -> None:
    islands = numbered(sizes)
    drawn = st.lists(st.floats(0, 1), min_size=len(sizes), max_size=len(sizes)).filter(lambda s: sum(s) > 0.1)
    shares = data.draw(drawn)
    homes = homes_of(elements, [share / sum(shares) for share in shares])
    assert homes[0][0] == 0
    assert homes[-1][1] == elements
    of = {rank: own for ranks in islands for rank, own in zip(ranks, inside_ranges(elements, len(ranks)), strict=True)}
    seen = np.zeros(elements, int)
    for segment in segments_of(islands, homes, most):
        assert 0 < segment.stop - segment.start <= most
        assert homes[segment.home][0] <= segment.start < segment.stop <= homes[segment.home][1]
        for rank, ranks in zip(segment.holders, islands, strict=True):
            assert rank in ranks
            assert of[rank][0] <= segment.start < segment.stop <= of[rank][1]
        seen[segment.start : segment.stop] += 1
    assert (seen == 1).all()


@given(SIZES, st.lists(st.floats(0.1, 10.0), min_size=5, max_size=5))
def test_links_carry_what_the_closed_form_says(sizes: list[int], bandwidths: list[float]) -> None:
    islands, elements = numbered(sizes), 10_000
    shares = shares_by_link(bandwidths[: len(sizes)])
    assert sum(shares) == pytest.approx(1)
    segments = segments_of(islands, homes_of(elements, shares), 1000)
    for number in range(len(islands)):
        # Its sums of elements that have another home, and the totals of its own to each of the others; as much comes in.
        moved = sum((s.stop - s.start) * (len(islands) - 1 if s.home == number else 1) for s in segments)
        assert moved == pytest.approx(elements * (1 + (len(islands) - 2) * shares[number]), abs=2 * len(islands))


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

"""The exchange between islands adds up everything once, and no link carries more than the closed form says."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from heterodyne.plan.islands import homes_of, inside_ranges, messages_of, shares_by_link

SIZES = st.lists(st.integers(1, 5), min_size=2, max_size=5)


def numbered(sizes: list[int]) -> list[list[int]]:
    ends = np.cumsum([0, *sizes])
    return [list(range(a, b)) for a, b in itertools.pairwise(ends)]


@given(SIZES, st.integers(0, 300), st.data())
def test_every_rank_ends_with_the_sum_of_all(sizes: list[int], elements: int, data: st.DataObject) -> None:
    islands = numbered(sizes)
    shares = data.draw(
        st.lists(st.floats(0, 1), min_size=len(sizes), max_size=len(sizes)).filter(lambda s: sum(s) > 0.1)
    )
    homes = homes_of(elements, [share / sum(shares) for share in shares])
    assert homes[0][0] == 0
    assert homes[-1][1] == elements
    there, back = messages_of(islands, homes)
    draw = np.random.default_rng(0)
    own = [draw.integers(0, 1000, elements) for _ in range(sum(sizes))]
    partial = {rank: sum(own[other] for other in ranks) for ranks in islands for rank in ranks}
    of = {
        rank: range_
        for ranks in islands
        for rank, range_ in zip(ranks, inside_ranges(elements, len(ranks)), strict=True)
    }
    totals = {rank: np.array(partial[rank]) for rank in partial}
    for message in there:
        for rank in (message.sender, message.receiver):
            assert of[rank][0] <= message.start < message.stop <= of[rank][1]
        totals[message.receiver][message.start : message.stop] += partial[message.sender][message.start : message.stop]
    for message in back:
        totals[message.receiver][message.start : message.stop] = totals[message.sender][message.start : message.stop]
    for rank, (low, high) in of.items():
        assert np.array_equal(totals[rank][low:high], sum(own)[low:high])


@given(SIZES, st.lists(st.floats(0.1, 10.0), min_size=5, max_size=5))
def test_links_carry_what_the_closed_form_says(sizes: list[int], bandwidths: list[float]) -> None:
    islands, elements = numbered(sizes), 10_000
    shares = shares_by_link(bandwidths[: len(sizes)])
    assert sum(shares) == pytest.approx(1)
    there, back = messages_of(islands, homes_of(elements, shares))
    for number, ranks in enumerate(islands):
        for end in ("sender", "receiver"):
            moved = sum(m.stop - m.start for m in [*there, *back] if getattr(m, end) in ranks)
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

"""Units dealt out by unequal shares: all of them, nobody far from its due, and nobody empty who has a share."""

from __future__ import annotations

from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from heterodyne.graph.sharding.dealing import dealt, dealt_to_all

SHARES = st.lists(st.integers(0, 9), min_size=1, max_size=6).filter(any)


@given(st.integers(0, 500), SHARES)
def test_all_units_are_dealt_out_and_nobody_is_a_unit_from_its_due(units: int, shares: list[int]) -> None:
    counts = dealt(units, shares)
    assert sum(counts) == units
    for count, share in zip(counts, shares, strict=True):
        assert abs(count - units * share / sum(shares)) <= 1
        assert share or not count


@given(st.integers(0, 500), SHARES, st.integers(1, 7))
def test_only_ratios_count(units: int, shares: list[int], times: int) -> None:
    more = [times * share for share in shares]
    assert dealt(units, more) == dealt(units, shares)
    assert dealt_to_all(units, more) == dealt_to_all(units, shares)


@given(st.integers(0, 500), st.integers(1, 9), st.integers(1, 9), st.integers(1, 9))
def test_borders_that_are_due_at_one_place_are_at_one_place(units: int, a: int, b: int, c: int) -> None:
    """What is cut for two devices has a border in common with what is cut for the same two and a third within one of them."""
    narrow, wide = dealt(units, (a, b + c)), dealt(units, (a, b, c))
    assert set(accumulate(narrow)) <= set(accumulate(wide))


@given(st.integers(0, 500), SHARES)
def test_nobody_with_a_share_goes_without_where_there_are_units_for_all(units: int, shares: list[int]) -> None:
    counts = dealt_to_all(units, shares)
    assert sum(counts) == units
    assert min(counts) >= 0
    takers = sum(share > 0 for share in shares)
    for count, share in zip(counts, shares, strict=True):
        assert share or not count
        if units >= takers and share:
            assert count >= 1


def test_a_unit_is_not_taken_from_who_has_but_one() -> None:
    assert dealt(3, (1, 1, 3)) == (1, 0, 2)
    assert dealt_to_all(3, (1, 1, 3)) == (1, 1, 1)


@given(st.integers(1, 40), st.lists(st.integers(1, 9), min_size=1, max_size=6))
def test_many_units_are_dealt_out_by_eights(eights: int, shares: list[int]) -> None:
    units = 8 * 4 * len(shares) * eights
    assert all(count % 8 == 0 for count in dealt_to_all(units, shares))


@pytest.mark.parametrize("shares", [(0, 0), (2, -1)])
def test_shares_that_mean_nothing_are_refused(shares: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="one of them must be positive"):
        dealt(4, shares)

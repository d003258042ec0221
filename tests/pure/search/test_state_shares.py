"""Shards of state: the least time, no device beyond its room, and nothing more unequal than it must be."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from heterodyne.search.sharding import least_time_shards

UNITS = 12
devices = st.lists(st.tuples(st.integers(0, UNITS + 2), st.integers(1, 6)), min_size=2, max_size=4)


def seconds(kept: tuple[float, ...], rates: list[int], total: float) -> float:
    return max((total - own) / rate for own, rate in zip(kept, rates, strict=True))


@given(devices=devices)
def test_no_other_shards_take_less_time(devices: list[tuple[int, int]]) -> None:
    room, rates = [room for room, _ in devices], [rate for _, rate in devices]
    found = least_time_shards(UNITS, room, rates)
    others = [own for own in product(*(range(most + 1) for most in room)) if sum(own) == UNITS]
    assert (found is None) == (not others)
    if found is None:
        return
    assert sum(found) == pytest.approx(UNITS)
    assert all(-1e-9 <= own <= most + 1e-9 for own, most in zip(found, room, strict=True))
    assert seconds(found, rates, UNITS) <= min(seconds(own, rates, UNITS) for own in others) + 1e-9


def test_equal_links_give_shards_as_equal_as_memory_allows() -> None:
    assert least_time_shards(12, [100, 100, 100], [1, 1, 1]) == pytest.approx((4, 4, 4))
    assert least_time_shards(12, [1, 100, 100], [1, 1, 1]) == pytest.approx((1, 5.5, 5.5))
    assert least_time_shards(12, [1, 2, 9], [1, 1, 1]) == pytest.approx((1, 2, 9))
    assert least_time_shards(12, [1, 2, 8], [1, 1, 1]) is None
    assert least_time_shards(12, [-1, 20, 20], [1, 1, 1]) is None


def test_what_is_behind_a_slow_link_keeps_more() -> None:
    """It sends (12 - s) over a link of 1, the others over links of 4: it is the slowest until it keeps all."""
    assert least_time_shards(12, [100, 100], [1, 4]) == pytest.approx((9.6, 2.4))
    assert least_time_shards(12, [6, 100], [1, 4]) == pytest.approx((6, 6))


def test_nothing_takes_no_room() -> None:
    assert least_time_shards(0, [0, 0], [1, 1]) == (0, 0)

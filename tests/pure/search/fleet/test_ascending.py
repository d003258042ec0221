"""Best first by a bound that is made tighter on the way, against sorting by the whole."""

from __future__ import annotations

from itertools import islice

from hypothesis import given
from hypothesis import strategies as st

from heterodyne.search.fleet.climbing import ascending

Parts = st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20)), max_size=30)


@given(Parts, st.integers(0, 45))
def test_the_order_is_that_of_the_sums(parts: list[tuple[int, int]], below: int) -> None:
    found = list(ascending(parts, lambda item: item[0], lambda item: item[1], below))
    assert [sum(item) for item in found] == sorted(sum(item) for item in parts if sum(item) < below)


@given(Parts, st.integers(0, 45), st.integers(0, 5))
def test_the_second_look_is_only_at_those_that_may_be_next(
    parts: list[tuple[int, int]], below: int, count: int
) -> None:
    asked: list[tuple[int, int]] = []

    def more(item: tuple[int, int]) -> float:
        asked.append(item)
        return item[1]

    found = list(islice(ascending(parts, lambda item: item[0], more, below), count))
    last = max((sum(item) for item in found), default=0) if len(found) == count else below
    assert all(item[0] <= last for item in asked)

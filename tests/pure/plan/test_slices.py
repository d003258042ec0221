"""Slices of a micro-batch: contiguous, whole, and never more than one sample from what is due."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from heterodyne.plan import Axis, Layout, Region, Stage
from heterodyne.plan.slices import overlap, slices

SHARES = st.lists(st.integers(0, 9), min_size=1, max_size=6).filter(any)


@given(st.integers(0, 64), SHARES)
def test_slices_cover_the_micro_batch_in_order(size: int, shares: list[int]) -> None:
    made = slices(size, shares)
    assert [sample for first, count in made for sample in range(first, first + count)] == list(range(size))
    for (_, count), share in zip(made, shares, strict=True):
        assert abs(count - size * share / sum(shares)) <= 1
        assert share or not count


@given(st.integers(0, 64), SHARES, st.integers(1, 5))
def test_only_ratios_count(size: int, shares: list[int], times: int) -> None:
    assert slices(size, shares) == slices(size, [times * share for share in shares])


@given(st.integers(0, 64), SHARES, SHARES)
def test_neighbours_of_any_width_exchange_every_sample_once(size: int, a: list[int], b: list[int]) -> None:
    common = [overlap(x, y) for x in slices(size, a) for y in slices(size, b)]
    assert sorted(s for first, count in common for s in range(first, first + count)) == list(range(size))


@given(st.integers(0, 64), SHARES, SHARES)
def test_slices_of_a_mesh_are_slices_of_those_of_its_rows(size: int, rows: list[int], within: list[int]) -> None:
    layout = Layout(shares=tuple(rows), inner=(Axis(kind="split", shares=tuple(within)),))
    devices = tuple(str(number) for number in range(len(layout.of_devices)))
    stage = Stage(ops=(0, 1), devices=devices, regions=(Region(layout=layout),))
    assert stage.slices(size) == tuple(
        (first + start, count) for first, own in slices(size, rows) for start, count in slices(own, within)
    )
    assert stage.sharded == (len(within) > 1)
    assert [device for row in stage.rows for device in row] == list(devices)
    assert stage.row_slices(size) == slices(size, rows)


@pytest.mark.parametrize("shares", [(), (0, 0), (2, -1)])
def test_shares_that_mean_nothing_are_refused(shares: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"must be positive|empty"):
        slices(4, shares)

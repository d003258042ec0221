"""The balance is exact: no other shares have a shorter longest time, nor, among those, a shorter total."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from heterodyne.errors import InfeasibleError
from heterodyne.plan import MicroBatches
from heterodyne.search.balance import balance
from heterodyne.search.micro_batch_choice import MicroBatchChoice

#: non-decreasing tables of whole seconds, so that sums are exact and ties are frequent
TABLES = st.lists(
    st.lists(st.integers(0, 3), min_size=1, max_size=7).map(
        lambda steps: [float(sum(steps[: n + 1])) for n in range(len(steps))]
    ),
    min_size=1,
    max_size=4,
)


def brute_force(tables: list[list[float]], samples: int) -> tuple[float, float] | None:
    options = [
        (max(times), sum(times))
        for shares in product(*(range(len(table)) for table in tables))
        if sum(shares) == samples
        for times in [[table[n] for table, n in zip(tables, shares, strict=True)]]
    ]
    return min(options, default=None)


@pytest.mark.tour("search/")
@given(TABLES, st.integers(0, 16))
def test_it_is_what_trying_everything_finds(tables: list[list[float]], samples: int) -> None:
    best = brute_force(tables, samples)
    if best is None:
        with pytest.raises(InfeasibleError, match=f"the global batch has {samples}"):
            balance(tables, samples)
        return
    found = balance(tables, samples)
    assert sum(found.shares) == samples
    assert (found.longest_s, found.total_s) == best
    assert [table[n] for table, n in zip(tables, found.shares, strict=True)].count(best[0]) >= 1


@given(TABLES, st.integers(0, 16), st.data())
def test_least_shares_are_kept(tables: list[list[float]], samples: int, data: st.DataObject) -> None:
    least = [data.draw(st.integers(0, 3)) for _ in tables]
    best = brute_force(tables, samples - sum(least)) if samples >= sum(least) else None
    if best is None:
        with pytest.raises(InfeasibleError):
            balance(tables, samples, least)
        return
    found = balance(tables, samples, least)
    assert all(share >= low for share, low in zip(found.shares, least, strict=True))
    assert (found.longest_s, found.total_s) == best


@given(TABLES, st.integers(0, 16))
def test_the_same_again_is_the_same(tables: list[list[float]], samples: int) -> None:
    if brute_force(tables, samples) is not None:
        assert balance(tables, samples) == balance(tables, samples)


@given(st.integers(1, 6), st.integers(1, 12), st.lists(st.floats(0.01, 1), min_size=72, max_size=72))
def test_equal_devices_get_equal_shares_where_the_batch_divides(devices: int, each: int, steps: list[float]) -> None:
    table = [sum(steps[:n]) for n in range(devices * each + 1)]
    assert balance([table] * devices, devices * each).shares == (each,) * devices


@given(st.lists(st.floats(0.1, 10), min_size=1, max_size=6))
def test_of_a_large_batch_shares_are_as_the_speeds(speeds: list[float]) -> None:
    samples = 2000
    shares = balance([[n / speed for n in range(samples + 1)] for speed in speeds], samples).shares
    for share, speed in zip(shares, speeds, strict=True):
        assert share == pytest.approx(samples * speed / sum(speeds), abs=len(speeds))


def test_the_example_of_four_devices() -> None:
    tables = [[n / speed for n in range(65)] for speed in (0.7, 0.35, 0.35, 0.2)]
    assert balance(tables, 64).shares == (28, 14, 14, 8)


def test_a_fixed_cost_leaves_out_a_device_that_is_too_slow_to_be_worth_it() -> None:
    quick = [0.0, *(1.0 + n for n in range(1, 9))]
    slow = [0.0, *(30.0 + n for n in range(1, 9))]
    assert balance([quick, slow], 8).shares == (8, 0)


def test_a_table_that_falls_is_refused() -> None:
    with pytest.raises(ValueError, match="more samples cannot take less time"):
        balance([[0.0, 2.0, 1.0]], 1)
    with pytest.raises(ValueError, match="empty"):
        balance([[]], 0)


@given(
    st.lists(st.floats(0, 2), min_size=16, max_size=16),
    st.sets(st.sampled_from([1, 2, 4, 8]), min_size=1),
    st.integers(1, 16),
    st.floats(0, 2),
)
def test_runs_take_the_fewest_micro_batches_of_the_fastest_ways(
    steps: list[float], sizes: set[int], samples: int, fixed: float
) -> None:
    def seconds(size: float) -> float:
        return sum(steps[: int(size)])

    runs = MicroBatchChoice(seconds=seconds, sizes=tuple(sorted(sizes)), fixed_s=fixed)
    chosen = runs.micro_batches(samples)
    assert chosen.samples == samples
    ways = [MicroBatches.of_samples(samples, size) for size in sizes]
    best = min(map(runs.compute_s, ways))
    assert runs.compute_s(chosen) <= 1.03 * best + 1e-12
    assert all(len(chosen) <= len(way) for way in ways if runs.compute_s(way) <= 1.0299 * best)
    table = runs.table(samples)
    assert table[0] == 0
    assert table[-1] >= best + fixed - 1e-12
    assert table == sorted(table)


def test_the_rate_is_that_of_the_best_size() -> None:
    runs = MicroBatchChoice(seconds=lambda size: {1: 1.0, 2: 1.5, 4: 4.0}[int(size)], sizes=(1, 2, 4), fixed_s=9.0)
    assert runs.rate == 2 / 1.5
    assert MicroBatchChoice(seconds=lambda size: 0.0, sizes=(1,)).rate == float("inf")


def test_the_rest_runs_first_so_that_the_last_backward_is_long() -> None:
    assert str(MicroBatchChoice(seconds=lambda n: n, sizes=(4,)).micro_batches(14)) == "1x2+3x4"


def test_a_fixed_count_bounds_the_share_on_both_sides() -> None:
    table = MicroBatchChoice(seconds=lambda n: n, sizes=(1, 2), fixed_s=1.0).table_of_count(3, 100)
    assert table == [4.0, 5.0, 6.0, 7.0]  # 3 to 6 samples in three micro-batches of at most two

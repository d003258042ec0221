"""Slices of a sequence under a causal mask: whole, in order, and done as soon as any slices can be."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from heterodyne.graph.sharding.causal import causal_sizes

SPEEDS = st.lists(st.one_of(st.just(0.0), st.floats(0.05, 9.0)), min_size=1, max_size=5).filter(any)
COSTS = st.tuples(st.sampled_from([0.0, 0.7, 40.0]), st.sampled_from([0.0, 0.3, 2.0])).filter(any)


def times(sizes: Sequence[int], speeds: Sequence[float], per_token: float, attention: float) -> list[float]:
    """How long each device is busy, added up token by token: each of its queries meets all keys up to the end of its slice."""
    found = []
    for (start, stop), speed in zip(pairwise(accumulate(sizes, initial=0)), speeds, strict=True):
        cost = sum(per_token + attention * stop for _ in range(start, stop))
        found.append(cost / speed if cost else 0.0)
    return found


def compositions(length: int, parts: int) -> Iterator[tuple[int, ...]]:
    if parts == 1:
        yield (length,)
        return
    for first in range(length + 1):
        for rest in compositions(length - first, parts - 1):
            yield (first, *rest)


@given(st.integers(0, 3000), SPEEDS, COSTS)
def test_slices_cover_the_sequence_and_a_device_without_speed_gets_none(
    length: int, speeds: list[float], costs: tuple[float, float]
) -> None:
    sizes = causal_sizes(length, speeds, per_token_cost=costs[0], attention_cost=costs[1])
    assert sum(sizes) == length
    assert len(sizes) == len(speeds)
    assert all(size >= 0 and (speed > 0 or size == 0) for size, speed in zip(sizes, speeds, strict=True))


@given(st.integers(0, 9), st.lists(st.floats(0.05, 9.0), min_size=1, max_size=4), COSTS)
def test_no_other_slices_are_done_sooner(length: int, speeds: list[float], costs: tuple[float, float]) -> None:
    sizes = causal_sizes(length, speeds, per_token_cost=costs[0], attention_cost=costs[1])
    best = min(max(times(other, speeds, *costs)) for other in compositions(length, len(speeds)))
    assert max(times(sizes, speeds, *costs)) <= best * (1 + 1e-6)


@given(st.lists(st.floats(0.5, 9.0), min_size=1, max_size=5), COSTS)
def test_long_sequences_keep_all_devices_busy_equally_long(speeds: list[float], costs: tuple[float, float]) -> None:
    length = 20_000
    found = times(causal_sizes(length, speeds, per_token_cost=costs[0], attention_cost=costs[1]), speeds, *costs)
    last_token = costs[0] + costs[1] * length
    assert max(found) - min(found) <= 2 * last_token / min(speeds)


@given(st.integers(0, 500), SPEEDS, COSTS, st.floats(0.01, 100.0))
def test_the_units_of_speed_do_not_matter(
    length: int, speeds: list[float], costs: tuple[float, float], unit: float
) -> None:
    named = {"per_token_cost": costs[0], "attention_cost": costs[1]}
    scaled = causal_sizes(length, [speed * unit for speed in speeds], **named)
    plain = causal_sizes(length, speeds, **named)
    # Two borders may be equally near, so the sizes may differ; the time does not.
    assert max(times(scaled, speeds, *costs)) == pytest.approx(max(times(plain, speeds, *costs)), rel=1e-6)


def test_early_tokens_are_cheap_so_the_first_device_takes_more_of_them() -> None:
    assert causal_sizes(12, [1, 1], per_token_cost=0, attention_cost=1) == (7, 5)
    assert causal_sizes(12, [1, 1], per_token_cost=1e6, attention_cost=1) == (6, 6)
    assert causal_sizes(12, [1, 2], per_token_cost=1, attention_cost=0) == (4, 8)


def test_what_is_left_over_goes_where_the_borders_are_nearest() -> None:
    assert causal_sizes(10, [1, 1, 1], per_token_cost=1, attention_cost=0) == (3, 4, 3)
    assert causal_sizes(10, [1, 0, 1, 1], per_token_cost=1, attention_cost=0) == (3, 0, 4, 3)
    assert causal_sizes(1, [1, 1, 5], per_token_cost=1, attention_cost=0) == (0, 0, 1)


@pytest.mark.parametrize(
    ("length", "speeds", "per_token", "attention"),
    [(-1, [1.0], 1, 1), (4, [], 1, 1), (4, [0.0], 1, 1), (4, [1, -1], 1, 1), (4, [1], 0, 0), (4, [1], -1, 2)],
)
def test_what_cannot_be_shared_out_is_refused(
    length: int, speeds: list[float], per_token: float, attention: float
) -> None:
    with pytest.raises(ValueError, match=r"cannot be shared out|must cost something"):
        causal_sizes(length, speeds, per_token_cost=per_token, attention_cost=attention)

"""Micro-batches: text and value are inverse, and nothing of a share is lost."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from heterodyne.plan import MicroBatches

SIZES = st.lists(st.integers(1, 5), max_size=12).map(lambda s: MicroBatches(tuple(s)))


@given(SIZES)
def test_text_and_value_are_inverse(micro_batches: MicroBatches) -> None:
    assert MicroBatches.parse(str(micro_batches)) == micro_batches


@given(SIZES)
def test_offsets_cover_the_samples_without_a_gap(micro_batches: MicroBatches) -> None:
    covered = [sample for first, size in micro_batches.offsets() for sample in range(first, first + size)]
    assert covered == list(range(micro_batches.samples))
    assert len(list(micro_batches.offsets())) == len(micro_batches)


@given(st.integers(0, 200), st.integers(1, 20))
def test_of_samples_uses_one_size_and_one_rest(samples: int, size: int) -> None:
    sizes = MicroBatches.of_samples(samples, size).sizes
    assert sum(sizes) == samples
    assert set(sizes[:-1]) <= {size}
    assert all(1 <= s <= size for s in sizes)


@given(st.integers(0, 200), st.integers(1, 20))
def test_of_count_is_as_even_as_can_be(samples: int, count: int) -> None:
    if count > samples:
        with pytest.raises(ValueError, match="cannot make"):
            MicroBatches.of_count(samples, count)
        return
    sizes = MicroBatches.of_count(samples, count).sizes
    assert (sum(sizes), len(sizes)) == (samples, count)
    assert max(sizes) - min(sizes) <= 1


def test_none_is_written_as_zero() -> None:
    assert str(MicroBatches()) == "0"
    assert MicroBatches.of_samples(0, 4) == MicroBatches.parse("0") == MicroBatches.of_count(0, 0)


@pytest.mark.parametrize("text", ["", "4", "x4", "0x4", "4x0", "4x4+", "4x4+0", "-1x4", "4*4", "1.5x2"])
def test_what_is_no_list_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ValueError, match="COUNTxSIZE"):
        MicroBatches.parse(text)


def test_a_micro_batch_has_a_sample() -> None:
    with pytest.raises(ValueError, match="at least one sample"):
        MicroBatches((2, 0))

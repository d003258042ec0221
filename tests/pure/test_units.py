"""Quantities: what people write is read exactly, what is not a quantity is refused with an example of one."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from heterodyne.errors import UnitError
from heterodyne.units import (
    format_bandwidth,
    format_bytes,
    format_count,
    format_seconds,
    parse_bandwidth,
    parse_bytes,
    parse_seconds,
)


@pytest.mark.parametrize(
    ("text", "size"),
    [("16 GiB", 16 * 2**30), ("80 GB", 80 * 10**9), ("1_024", 1024), (4096, 4096), ("1.5KiB", 1536), ("1e3 B", 1000)],
)
def test_sizes(text: str | int, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.tour("units.py")
@pytest.mark.parametrize(
    ("text", "rate"),
    [("25 GB/s", 25e9), ("50 Gb/s", 6.25e9), ("50 Gbps", 6.25e9), ("100 Mbit/s", 12.5e6), ("1 GiB/s", 2**30)],
)
def test_bandwidths_tell_bits_from_bytes(text: str, rate: float) -> None:
    assert parse_bandwidth(text) == rate


@pytest.mark.parametrize(
    ("text", "seconds"), [("10 us", 1e-5), ("10 µs", 1e-5), ("1.5 ms", 1.5e-3), ("2 h", 7200.0), (0, 0.0), ("0", 0.0)]
)
def test_times(text: str | int, seconds: float) -> None:
    assert parse_seconds(text) == pytest.approx(seconds, rel=1e-15)


@pytest.mark.parametrize("text", ["25 GX/s", "25", "GB/s", "-3 GB/s", "", "3 4 GB/s", "nan GB/s", "25 GB", True])
def test_what_is_no_bandwidth_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(UnitError, match="for example '25 GB/s'"):
        parse_bandwidth(text)


def test_a_bare_number_is_bytes_but_never_a_time() -> None:
    assert parse_bytes("7") == 7
    with pytest.raises(UnitError, match="has no unit"):
        parse_seconds("7")


def test_infinite_is_refused() -> None:
    with pytest.raises(UnitError, match="not finite"):
        parse_bytes("1e400 B")


@given(st.integers(0, 2**60))
def test_written_sizes_are_read_back_to_three_digits(size: int) -> None:
    assert parse_bytes(format_bytes(size)) == pytest.approx(size, rel=5.1e-3)


@given(st.floats(1e-2, 1e17))
def test_written_bandwidths_are_read_back_to_three_digits(rate: float) -> None:
    assert parse_bandwidth(format_bandwidth(rate)) == pytest.approx(rate, rel=5.1e-3)


@given(st.floats(1e-9, 99))
def test_written_times_are_read_back_to_three_digits(seconds: float) -> None:
    assert parse_seconds(format_seconds(seconds)) == pytest.approx(seconds, rel=5.1e-3)


def test_words_for_people() -> None:
    assert format_seconds(0) == "0 s"
    assert format_seconds(123) == "2 min 03 s"
    assert format_seconds(3720) == "1 h 02 min"
    assert format_count(10_700_000) == "10.7 M"
    assert format_bytes(1.5 * 2**30) == "1.5 GiB"

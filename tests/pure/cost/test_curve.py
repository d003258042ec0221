"""Curves through measured points: exact at the points, never falling, never negative."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from heterodyne.cost.curve import Curve

SAMPLES = st.dictionaries(st.integers(1, 64), st.floats(0, 100), min_size=1, max_size=6).map(
    lambda points: sorted(points.items())
)


@given(SAMPLES, st.floats(0, 128), st.floats(0, 128))
def test_never_falls_and_never_goes_below_zero(samples: list[tuple[int, float]], a: float, b: float) -> None:
    for curve in (Curve.fit(samples), Curve.envelope(samples)):
        low, high = sorted((a, b))
        assert 0 <= curve(low) <= curve(high) * (1 + 1e-12) + 1e-12


@given(SAMPLES)
def test_rising_samples_are_met_exactly(samples: list[tuple[int, float]]) -> None:
    rising = [(size, float(number)) for number, (size, _) in enumerate(samples)]
    assert [Curve.fit(rising)(size) for size, _ in rising] == [value for _, value in rising]


@given(SAMPLES)
def test_the_envelope_is_below_no_sample(samples: list[tuple[int, float]]) -> None:
    assert all(Curve.envelope(samples)(size) >= value for size, value in samples)


@given(SAMPLES)
def test_the_fit_is_the_nearest_rising_curve(samples: list[tuple[int, float]]) -> None:
    """It keeps the mean, and flattening it to any one value is no nearer: both hold of an isotonic projection."""
    fitted = [Curve.fit(samples)(size) for size, _ in samples]
    values = [value for _, value in samples]
    assert sum(fitted) == pytest.approx(sum(values), abs=1e-9)
    distance = sum((f - v) ** 2 for f, v in zip(fitted, values, strict=True))
    for flat in values:
        assert distance <= sum((flat - v) ** 2 for v in values) + 1e-6


@given(st.floats(0, 10), st.floats(0.1, 10), st.integers(1, 200))
def test_an_affine_quantity_is_met_everywhere(fixed: float, each: float, size: int) -> None:
    curve = Curve.fit((s, fixed + each * s) for s in (2, 4, 8))
    assert curve(size) == pytest.approx(fixed + each * size)


def test_one_sample_means_in_proportion_and_nothing_costs_nothing() -> None:
    assert Curve.fit([(4, 2.0)])(6) == 3.0
    assert Curve.fit([(4, 2.0)])(0) == 0.0


def test_a_curve_that_bends_upwards_promises_no_free_work() -> None:
    assert Curve.fit([(4, 1.0), (8, 10.0)])(1) == 0.25


@pytest.mark.parametrize("samples", [[], [(0, 1.0)], [(1, -1.0)], [(1, 1.0), (1, 2.0)]])
def test_what_is_no_measurement_is_refused(samples: list[tuple[int, float]]) -> None:
    for make in (Curve.fit, Curve.envelope):
        with pytest.raises(ValueError, match=r"a curve needs|must be positive"):
            make(samples)

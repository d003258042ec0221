"""Sizes are polynomials in the batch: a ring, and evaluated as one."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from heterodyne.graph.size import ZERO, Size

SIZES = st.lists(st.integers(-5, 5), max_size=3).map(lambda c: Size(tuple(c)))


@given(SIZES, SIZES, st.integers(0, 9))
def test_evaluation_commutes_with_sum_and_product(a: Size, b: Size, batch: int) -> None:
    assert (a + b)(batch) == a(batch) + b(batch)
    assert (a * b)(batch) == a(batch) * b(batch)
    assert (a * 3)(batch) == (3 * a)(batch) == 3 * a(batch)


@given(SIZES, SIZES, SIZES)
def test_sums_and_products_do_not_depend_on_the_order(a: Size, b: Size, c: Size) -> None:
    assert a + b == b + a
    assert a * b == b * a
    assert (a + b) * c == a * c + b * c
    assert Size.total([a, b, c]) == Size.total([c, a, b])


@given(SIZES)
def test_equal_sizes_have_one_form(a: Size) -> None:
    assert a + ZERO == a
    assert Size((*a.coefficients, 0, 0)) == a
    assert (a * 0) == ZERO


def test_constant_and_per_sample() -> None:
    assert Size.of(3).is_constant
    assert ZERO.is_constant
    assert not Size.per_sample(2).is_constant
    assert (Size.of(3) + Size.per_sample(2))(10) == 23

"""Conversions between layouts: what goes forward for tensors goes backward for their gradients."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from heterodyne.graph.sharding import COPY, PARTIAL, REPLICATE, Layout, Price, conversion, sharded
from pure.graph.sharding.consistency import gradient_of

LAYOUTS = (REPLICATE, COPY, PARTIAL, sharded(0), sharded(1), sharded(0, by=1))


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_the_gradient_of_a_gradient_lies_as_the_tensor(layout: Layout) -> None:
    assert gradient_of(gradient_of(layout)) == layout


@pytest.mark.parametrize(("have", "want"), [*product(LAYOUTS, LAYOUTS)], ids=str)
def test_backward_is_the_way_back_between_the_layouts_of_the_gradients(have: Layout, want: Layout) -> None:
    back = conversion(gradient_of(want), gradient_of(have))
    assert conversion(have, want).backward == back.forward
    assert conversion(have, want).forward == back.backward


@pytest.mark.parametrize(("have", "want"), [*product(LAYOUTS, LAYOUTS)], ids=str)
def test_without_gradients_nothing_goes_backward(have: Layout, want: Layout) -> None:
    found = conversion(have, want, differentiable=False)
    assert (found.forward, found.backward) == (conversion(have, want).forward, None)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_to_lie_as_before_costs_nothing(layout: Layout) -> None:
    assert (conversion(layout, layout).forward, conversion(layout, layout).backward) == (None, None)


@given(st.integers(2, 16), st.floats(0, 1e9), st.floats(0, 1e6))
def test_an_all_reduce_sends_what_a_reduce_scatter_and_an_all_gather_do(
    members: int, size: float, latency: float
) -> None:
    price = Price(members=members, unevenness=1.0, latency_bytes=latency)
    parts = price.collective("reduce_scatter", size) + price.collective("all_gather", size)
    assert price.collective("all_reduce", size) == pytest.approx(parts - latency)


def test_alone_nothing_is_exchanged() -> None:
    price = Price(members=1, unevenness=1.0)
    assert price.collective("all_reduce", 1e6) == 0


@given(st.floats(0, 1e12), st.floats(0, 1e9), st.floats(1, 9))
def test_work_that_all_repeat_takes_as_long_as_the_slowest_takes(
    flops: float, traffic: float, unevenness: float
) -> None:
    price = Price(members=3, unevenness=unevenness)
    shared = price.work(flops, traffic, divided=True)
    assert price.work(flops, traffic, divided=False) == pytest.approx(unevenness * shared)

"""Shares by speed: whole numbers near to the speeds, and slices of a sequence that take equally long."""

from __future__ import annotations

from dataclasses import replace
from math import gcd

import pytest
from hypothesis import given
from hypothesis import strategies as st

from heterodyne.cluster import Link
from heterodyne.cost.memory import MemoryAssumptions
from heterodyne.graph.sharding.causal import causal_sizes
from heterodyne.graph.sharding.dealing import dealt_by_speed
from heterodyne.search.by_speed import causal_shares, lighter_shares, shares_by
from heterodyne.search.planner import plan
from pure.build import cluster, linear, profile
from pure.cost.transformer import transformer

BARE = MemoryAssumptions(context_bytes={"cpu": 0}, fragmentation=0.0, block_bytes=0)
FAST = Link(between=("n0", "n0"), bandwidth_bytes_per_s=1e12, latency_s=1e-9)
RATES = st.lists(st.floats(0.1, 10.0), min_size=1, max_size=6)


@given(RATES, st.integers(6, 40))
def test_no_other_shares_are_done_sooner(rates: list[float], units: int) -> None:
    shares = dealt_by_speed(rates, units)
    assert sum(shares) == units
    slowest = max(share / rate for share, rate in zip(shares, rates, strict=True))
    for place, (share, rate) in enumerate(zip(shares, rates, strict=True)):
        if share > 1 and share / rate == slowest:  # it cannot be helped: one less here would be one more elsewhere
            others = [(shares[i] + 1) / rates[i] for i in range(len(rates)) if i != place]
            assert all(later >= slowest * (1 - 1e-12) for later in others)


@given(RATES)
def test_shares_have_no_common_factor_and_leave_nobody_out(rates: list[float]) -> None:
    shares = shares_by(rates)
    assert min(shares) >= 1
    assert gcd(*shares) == 1


def test_what_does_not_fit_goes_where_there_is_room() -> None:
    assert lighter_shares((2, 1), (10.0, 5.0), (20.0, 20.0)) == (2, 1)  # all fit
    shares = lighter_shares((2, 1), (20.0, 10.0), (10.0, 40.0))
    assert shares is not None
    assert shares[0] / sum(shares) == pytest.approx(2 / 3 * 0.97 / 2, abs=0.02)
    assert lighter_shares((1, 1), (20.0, 20.0), (10.0, 20.0)) is None
    assert lighter_shares((1, 1, 2), (10.0, 10.0, 30.0), (20.0, 10.0, 20.0)) is not None


def test_a_device_with_little_memory_has_a_narrower_part_than_its_speed_would_have_it() -> None:
    """The faster one of two would hold two thirds of the weights, and has room for less than half."""
    model = transformer(6)
    weights = sum(p.bytes for p in model.parameters)
    roomy = cluster(2, link=FAST, memory=10**9)
    small = replace(roomy.devices[0], memory_bytes=int(1.6 * weights))
    machines = replace(roomy, devices=(small, roomy.devices[1]))
    measured = profile(model, machines, [linear(1.0), linear(2.0)])
    given = {"global_batch_size": 1, "micro_batch_sizes": (1,), "strategy": "split", "memory": BARE}
    (stage,) = plan(model, machines, measured, **given).plan.pipelines[0].stages
    assert stage.shares[0] / sum(stage.shares) < 0.6
    (by_speed,) = (
        plan(model, roomy, profile(model, roomy, [linear(1.0), linear(2.0)]), **given).plan.pipelines[0].stages
    )
    assert by_speed.shares == (2, 1)


def test_shares_of_what_has_no_speed_are_equal() -> None:
    assert shares_by([0.0, 0.0]) == (1, 1)


def test_later_slices_are_shorter_by_what_attention_costs() -> None:
    """In the transformer of the tests, per layer and token: 2 * 48 * (4 * 48 + 2 * 192) operations, and 4 * 48 a pair."""
    tokens, layers = 240, 3
    model = transformer(layers, tokens=tokens)
    per_token = 2 * 48 * 48 / layers + 2 * 48 * (4 * 48 + 2 * 192)
    expected = causal_sizes(tokens, [2.0, 1.0], per_token_cost=per_token, attention_cost=2 * 4 * 48)
    found = causal_shares(model, [2.0, 1.0])
    assert found is not None
    assert sum(found) == tokens
    assert found[0] > tokens * 2 / 3
    assert found == pytest.approx(expected, abs=1)


def test_without_causal_attention_nobody_is_later() -> None:
    model = transformer(0, tokens=24)
    assert causal_shares(model, [2.0, 1.0]) is None


def test_the_planner_takes_shorter_slices_for_later_tokens_where_that_is_faster() -> None:
    model = transformer(tokens=480)
    machines = cluster(2, link=Link(between=("n0", "n0"), bandwidth_bytes_per_s=1e12, latency_s=1e-9))
    measured = profile(model, machines, [linear(1.0), linear(2.0)])
    planned = plan(model, machines, measured, global_batch_size=1, micro_batch_sizes=(1,), strategy="context")
    (stage,) = planned.plan.pipelines[0].stages
    assert sum(stage.shares) == 480
    assert stage.shares[0] > 320
    assert "later slices shorter" in planned.chosen.name

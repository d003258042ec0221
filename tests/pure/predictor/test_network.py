"""Collectives against the formulas of rings."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from heterodyne.predictor.network import Network

NETWORK = Network(
    devices=8, inside_bytes_per_s=100e9, between_bytes_per_s=50e9, inside_latency_s=0.0, between_latency_s=0.0
)


def test_a_device_alone_exchanges_nothing() -> None:
    group = NETWORK.group(1)
    assert NETWORK.all_reduce_s(group, 1e9) == NETWORK.gather_s(group, 1e9) == NETWORK.all_to_all_s(group, 1e9) == 0.0


@given(size=st.integers(2, 8), count=st.floats(1, 1e12))
def test_a_ring_in_a_node_passes_all_but_one_part(size: int, count: float) -> None:
    group = NETWORK.group(size)
    assert NETWORK.gather_s(group, count) == pytest.approx((size - 1) / size * count / 100e9)
    assert NETWORK.all_reduce_s(group, count) == pytest.approx(2 * NETWORK.gather_s(group, count))


def test_between_nodes_the_network_cards_of_a_node_are_shared() -> None:
    whole = NETWORK.group(32)
    assert (whole.inside, whole.nodes, whole.others) == (8, 4, 0)
    assert NETWORK.gather_s(whole, 32e9) == pytest.approx(31e9 / 50e9)
    # 32 replicas of groups of 4 neighbours: 2 of each group in a node, and 4 rings side by side.
    strided = NETWORK.group(32, 4)
    assert (strided.inside, strided.nodes, strided.others) == (2, 16, 3)
    assert NETWORK.gather_s(strided, 32e9) == pytest.approx(31e9 * 4 / 50e9)


def test_long_rings_wait_for_every_step_and_all_reduces_take_a_tree() -> None:
    slow = replace(NETWORK, between_latency_s=1e-5, inside_latency_s=1e-6)
    group = slow.group(1024)
    assert slow.gather_s(group, 1.0) == pytest.approx(1023 * 1e-5, rel=1e-3)
    assert slow.all_reduce_s(group, 1.0) == pytest.approx(2 * (3 * 1e-6 + 7 * 1e-5), rel=1e-3)


def test_tokens_for_devices_of_the_own_node_stay_in_it() -> None:
    near, far = NETWORK.group(8), NETWORK.group(16)
    assert NETWORK.all_to_all_s(near, 8e9) == pytest.approx(7e9 / 100e9)
    assert NETWORK.all_to_all_s(far, 16e9) == pytest.approx(8e9 * 8 / 50e9)


def test_where_links_go_from_device_to_device_few_have_few() -> None:
    mesh = replace(NETWORK, reached=tuple(links / 6 for links in (1, 1, 2, 4, 4, 4, 5, 6)))
    for size, links in ((2, 1), (4, 4), (8, 6)):
        switched, meshed = (net.gather_s(net.group(size), 1e9) for net in (NETWORK, mesh))
        assert meshed == pytest.approx(switched * 6 / links)

"""Buckets against trying every size by the formula that they come from."""

from __future__ import annotations

import math

import pytest

from heterodyne.cluster.spec import Cluster, Device, Link
from heterodyne.cost.collective import Collectives

PAIR = tuple(Device(id=f"{node}/gpu:0", kind="gpu", node=node, memory_bytes=2**40) for node in "ab")


def pair(latency_s: float, s_per_byte: float) -> Collectives:
    """Of two devices, whose all-reduce is two messages of half the bytes each."""
    link = Link(between=("a", "b"), bandwidth_bytes_per_s=1 / s_per_byte, latency_s=latency_s / 2)
    return Collectives(cluster=Cluster(name="pair", devices=PAIR, links=(link,)))


@pytest.mark.parametrize("latency_s", [2e-5, 3e-4])
@pytest.mark.parametrize("s_per_byte", [5e-12, 7e-10])
def test_no_other_size_costs_less(latency_s: float, s_per_byte: float) -> None:
    gradients = 40_000_000
    chosen = pair(latency_s, s_per_byte).bucket_bytes(gradients)

    def cost(size: float) -> float:
        return latency_s * gradients / size + s_per_byte * size

    assert chosen <= gradients
    for power in range(41):
        size = gradients / math.sqrt(2.0) ** power
        assert cost(chosen) <= cost(size) * (1 + 1e-9)


def test_slower_links_ask_for_smaller_buckets_and_latency_for_larger_ones() -> None:
    def of(latency_s: float, s_per_byte: float) -> int:
        return pair(latency_s, s_per_byte).bucket_bytes(10**9)

    assert of(1e-4, 1e-9) < of(1e-4, 1e-11)
    assert of(1e-5, 1e-9) < of(1e-3, 1e-9)


def test_of_unknown_links_it_is_what_it_was() -> None:
    unknown = Collectives(cluster=Cluster(name="pair", devices=PAIR, links=()))
    assert unknown.bucket_bytes(10**9) == 4 * 2**20

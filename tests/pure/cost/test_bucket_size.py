"""Buckets against trying every size by the formula that they come from."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest

from heterodyne.cost.bucket_size import bucket_bytes_for
from heterodyne.cost.collective import AlphaBeta
from heterodyne.errors import MeasureError


class Links:
    """Of two devices."""

    cluster = SimpleNamespace(devices=[SimpleNamespace(id="a"), SimpleNamespace(id="b")])

    def __init__(self, cost: AlphaBeta | None) -> None:
        self.cost = cost

    def all_reduce(self, devices: list[str]) -> AlphaBeta:
        assert devices == ["a", "b"]
        if self.cost is None:
            raise MeasureError("nothing is known")
        return self.cost


def graph(size: int) -> Any:
    return SimpleNamespace(
        parameters=[SimpleNamespace(bytes=size, trainable=True), SimpleNamespace(bytes=10**9, trainable=False)]
    )


@pytest.mark.parametrize("latency_s", [2e-5, 3e-4])
@pytest.mark.parametrize("s_per_byte", [5e-12, 7e-10])
def test_no_other_size_costs_less(latency_s: float, s_per_byte: float) -> None:
    gradients = 40_000_000
    chosen = bucket_bytes_for(graph(gradients), Links(AlphaBeta(latency_s, s_per_byte)))  # type: ignore[arg-type]

    def cost(size: float) -> float:
        return latency_s * gradients / size + s_per_byte * size

    assert chosen <= gradients
    for power in range(41):
        size = gradients / math.sqrt(2.0) ** power
        assert cost(chosen) <= cost(size) * (1 + 1e-9)


def test_slower_links_ask_for_smaller_buckets_and_latency_for_larger_ones() -> None:
    def of(latency_s: float, s_per_byte: float) -> int:
        return bucket_bytes_for(graph(10**9), Links(AlphaBeta(latency_s, s_per_byte)))  # type: ignore[arg-type]

    assert of(1e-4, 1e-9) < of(1e-4, 1e-11)
    assert of(1e-5, 1e-9) < of(1e-3, 1e-9)


def test_of_unknown_links_it_is_what_it_was() -> None:
    assert bucket_bytes_for(graph(10**9), Links(None)) == 4 * 2**20  # type: ignore[arg-type]

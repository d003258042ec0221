"""Attention on one place, experts on another: loss and gradients are those of one device, balance losses among them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from heterodyne.plan.schedules.best import best_orders
from heterodyne.plan.schedules.times import StageTimes
from multiprocess.exactness import Spread, require_exact
from multiprocess.models import captured
from multiprocess.pool import Pool
from multiprocess.work import PipelineOf, StageOf

WAYS = {
    "one and one": (StageOf(0, (0,), (1,)), StageOf(0, (1,), (1,))),
    "two and one": (StageOf(0, (0, 1), (2, 1)), StageOf(0, (2,), (1,))),
    "one and two in parts": (StageOf(0, (0,), (1,)), StageOf(0, (1, 2), (2, 1), kind="split", free=True)),
    "two and two": (StageOf(0, (0, 1), (1, 2)), StageOf(0, (2, 3), (2, 1))),
}


def spread(name: str, way: str, sizes: Sequence[int], stay: int = -1) -> Spread:
    """``stay``: the mixture whose experts are with the attention."""
    graph = captured(name)
    experts = [n for n, op in enumerate(graph.ops) if op.kind == "experts"]
    stops = [stop for number, n in enumerate(experts) if number != stay for stop in (n, n + 1)]
    stages = tuple(replace(WAYS[way][n % 2], stop=stop) for n, stop in enumerate([*stops, len(graph.ops)]))
    places = [n % 2 for n in range(len(stages))]
    times = [StageTimes(forward_s=1 + place, input_s=1, weight_s=1) for place in places]
    found = best_orders(times, places, len(sizes), joined=graph.together_from is not None, actions_played=0)
    order = tuple(" ".join(map(str, row)) for row in found.orders)
    return Spread(1 + max(WAYS[way][1].ranks), "1F1B", (PipelineOf(tuple(sizes), stages, order),))


@pytest.mark.parametrize("way", WAYS)
def test_experts_on_a_place_of_their_own(pool: Pool, way: str) -> None:
    require_exact(pool, "mixtral", spread("mixtral", way, (3, 2, 2)))


def test_the_experts_of_one_layer_stay(pool: Pool) -> None:
    require_exact(pool, "qwen3_moe", spread("qwen3_moe", "two and one", (3, 4), stay=0))


@pytest.mark.parametrize("way", [way for way in WAYS if "parts" not in way])
def test_a_loss_that_balances_the_experts(pool: Pool, way: str) -> None:
    require_exact(pool, "router", spread("router", way, (3, 2, 2)))

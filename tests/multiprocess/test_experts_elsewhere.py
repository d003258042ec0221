"""Attention on one place, experts on another: loss and gradients are those of one device."""

from __future__ import annotations

import pytest

from multiprocess.exactness import Spread, require_exact
from multiprocess.models import captured
from multiprocess.pool import Pool
from multiprocess.work import PipelineOf, StageOf


def zebra(places: tuple[int, ...], count: int) -> tuple[str, ...]:
    n = len(places)
    rows: list[list[str]] = [[] for _ in set(places)]
    for s in range(n - 1):
        rows[places[s]] += [f"{s}F{i}" for i in range(count)]
    rows[places[n - 1]] += [f"{n-1}{k}{i}" for i in range(count) for k in "FB"]
    for s in reversed(range(n - 1)):
        rows[places[s]] += [f"{s}B{i}" for i in range(count)]
    return tuple(map(" ".join, rows))


WAYS = {
    "one and one": (StageOf(0, (0,), (1,)), StageOf(0, (1,), (1,))),
    "two and one": (StageOf(0, (0, 1), (2, 1)), StageOf(0, (2,), (1,))),
    "one and two": (StageOf(0, (0,), (1,)), StageOf(0, (1, 2), (1, 1), kind="split", free=True)),
    "two and two": (StageOf(0, (0, 1), (1, 2)), StageOf(0, (2, 3), (2, 1), kind="split", free=True)),
    "two and samples": (StageOf(0, (0, 1), (1, 2)), StageOf(0, (2, 3), (2, 1))),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe"])
def test_exact(pool: Pool, name: str, way: str) -> None:
    graph = captured(name)
    experts = [n for n, op in enumerate(graph.ops) if op.kind == "experts"]
    stops = [stop for n in experts for stop in (n, n + 1)] + [len(graph.ops)]
    from dataclasses import replace
    stages = tuple(replace(WAYS[way][n % 2], stop=stop) for n, stop in enumerate(stops))
    places = tuple(n % 2 for n in range(len(stages)))
    order = zebra(places, 3)
    world = 1 + max(WAYS[way][1].ranks)
    require_exact(pool, name, Spread(world, "1F1B", (PipelineOf((3, 2, 2), stages, order),)))

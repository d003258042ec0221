"""The dynamic programme over sets of pools against all orders, widths and numbers of stages; and pipelines over more pools than three."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import permutations, product

import numpy as np
import pytest

from heterodyne.cluster.fleet import Fleet, Pool, Wire
from heterodyne.search.fleet.kinds import Kind, kinds_of
from heterodyne.search.fleet.space import Space
from heterodyne.search.fleet.template_search import TIMES, Room, TemplateSearch
from pure.search.fleet.small import GIB, Drawn, drawn, search_of


def _search_for(seed: int, *, memory: float = 1.0) -> TemplateSearch | None:
    fleet, costs, samples = drawn(random.Random(seed), devices=6, blocks=8, ways=3)
    search = search_of(fleet, costs, samples)
    kinds = kinds_of(fleet, search.tables, 2, Space())
    if not kinds:
        return None
    return TemplateSearch(
        kinds=[replace(kind, memory_bytes=kind.memory_bytes * memory) for kind in kinds],
        room=np.array([pool.devices for pool in fleet.pools]),
        most=fleet.devices,
        samples=samples,
        micro_batch=2,
        max_stages=8,
        max_pools=None,
        zero=1,
        recompute=True,
        filling=1.0,
    )


def _layers_of(search: TemplateSearch, kind: Kind, number: int, time: int, place: int) -> float:
    """Of a stage so many places from the end, without and with recompute."""
    layers = len(kind.table.costs)
    forward, backward, recomputed = (float(own[-1]) / layers for own in kind.table.passes)
    seconds, held = search.seconds[number, time], min(place, int(search.rounds[number]))
    found = []
    for again, each_s in ((False, forward + backward), (True, forward + backward + recomputed)):
        replicas = search.replicas[number]
        room = float(Room.of(kind, search.zero, recompute=again).most_layers(np.array(held), replicas))
        found.append(min(np.floor(seconds / each_s * (1 + 1e-9)), room, layers))
    return max(found)


@pytest.mark.parametrize("seed", range(8))
def test_no_order_of_pools_and_no_width_holds_more_layers(seed: int) -> None:
    search = _search_for(seed)
    if search is None:
        return
    pools = sorted({kind.pool for kind in search.kinds})
    chance = random.Random(seed)
    for number, time in [(chance.randrange(len(search.replicas)), chance.randrange(TIMES)) for _ in range(3)]:
        most: dict[tuple[int, int], float] = {}
        for count in range(1, len(pools) + 1):
            for order in permutations(pools, count):
                for chosen in product(*(_choices(search, pool, number) for pool in order)):
                    held, behind = 0.0, 0
                    for kind, stages in reversed(chosen):
                        for _ in range(stages):
                            behind += 1
                            held += _layers_of(search, kind, number, time, behind)
                    if behind <= search.stages:
                        key = sum(1 << pool for pool in order), behind
                        most[key] = max(most.get(key, 0.0), held)
        for own, layers in search.layers.items():
            for stages, held in enumerate(layers[number * TIMES + time].tolist()):
                if own:
                    assert held == most.get((own, stages), float("-inf"))


def _choices(search: TemplateSearch, pool: int, number: int) -> list[tuple[Kind, int]]:
    devices = int(search.room[pool] // search.replicas[number])
    found = {}
    for kind, part, less in product(search.kinds, (1, 2, 4), (0, 1)):
        count = min(devices // (kind.devices * part) - less, search.stages)
        if kind.pool == pool and count > 0:
            found[id(kind), count] = (kind, count)
    return list(found.values())


@pytest.mark.parametrize("seed", range(8))
def test_with_more_memory_no_fewer_layers_fit(seed: int) -> None:
    less, more = _search_for(seed), _search_for(seed, memory=1.5)
    if less is not None and more is not None:
        for own, layers in less.layers.items():
            assert np.all(more.layers[own] >= layers)


def test_a_pipeline_may_span_more_than_three_pools() -> None:
    """Where the model is too large for any three of four unlike devices."""
    best = search_of(*_four_devices()).run()
    assert best is not None
    assert len(best.plan.groups[0].template.devices) == 4
    few = search_of(*_four_devices(), Space(max_pools=3)).run()
    assert few is None


def _four_devices() -> tuple[Fleet, Drawn, int]:
    wire = Wire(bandwidth_bytes_per_s=8e9, latency_s=1e-4)
    pools = tuple(
        Pool(
            name=f"pool-{n}",
            kind=f"kind-{n}",
            nodes=1,
            devices_per_node=1,
            memory_bytes=10 * GIB,
            inside=wire,
            between=wire,
        )
        for n in range(4)
    )
    costs = Drawn(
        layers=("embedding", *["block"] * 8, "head"),
        speed={pool.kind: 2.0 + number for number, pool in enumerate(pools)},
        fixed_s=0.05,
        lost=0.8,
        backward=2.0,
        head=0.5,
        kept=0.02,
        weights=0.7,
    )
    return Fleet(name="four", pools=pools), costs, 8

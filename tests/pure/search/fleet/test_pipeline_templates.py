"""Cuts against all cuts, and the knapsack against all counts."""

from __future__ import annotations

import random
from itertools import combinations, pairwise, product

import numpy as np
import pytest

from heterodyne.cost.layers import Widths
from heterodyne.search.fleet.counts import Limits, best_per_devices, relaxed, whole
from heterodyne.search.fleet.kinds import kinds_of, usable_widths
from heterodyne.search.fleet.pipeline_templates import shapes
from heterodyne.search.fleet.space import Space
from heterodyne.search.fleet.stage_costs import Sharing
from pure.search.fleet.small import drawn, search_of


def test_the_cut_of_a_shape_has_the_fastest_slowest_stage_of_all_that_fit() -> None:
    for number in range(12):
        chance = random.Random(number)
        fleet, costs, samples = drawn(chance, devices=4, blocks=5)
        search = search_of(fleet, costs, samples)
        for shards in (1, 2):
            sharing = Sharing(replicas=shards, zero=(1,))
            kinds = {2: kinds_of(fleet, search.tables, 2, Space())}
            rows = shapes(fleet, kinds, global_batch=samples, sharing=sharing, space=Space()).get(2)
            if rows is None:
                continue
            for row in range(len(rows)):
                template = rows.templates([row])[0][0]
                kinds = [(stage.pool, stage.widths) for stage in template.stages]
                layers = len(costs.layers)
                best = float("inf")
                for cut in combinations(range(1, layers), len(kinds) - 1):
                    slowest = 0.0
                    for place, ((pool, widths), (start, stop)) in enumerate(
                        zip(kinds, pairwise((0, *cut, layers)), strict=True)
                    ):
                        table = search.tables.table(fleet.pool(pool).kind, widths, 2)
                        assert table is not None
                        held = min(len(kinds) - place, -(-samples // 2))
                        own = [
                            table.forward_s(start, stop) + table.backward_s(start, stop, again)
                            for again in (False, True)
                            if table.memory(start, stop, recompute=again, held=held, replicas=shards, zero=1).total
                            <= fleet.pool(pool).memory_bytes
                        ]
                        slowest = max(slowest, min(own, default=float("inf")))
                    best = min(best, slowest)
                assert rows.longest_s[row] == pytest.approx(best)


def _tensor(*widths: int) -> tuple[Widths, ...]:
    return tuple(Widths(width) for width in widths)


def test_widths_fill_nodes_without_a_rest() -> None:
    assert usable_widths(_tensor(1, 2, 4, 8), 8) == _tensor(1, 2, 4, 8)
    assert usable_widths(_tensor(1, 2, 4), 6) == _tensor(1, 2)
    assert usable_widths(_tensor(1, 3, 4), 12) == _tensor(1, 4)
    assert usable_widths(_tensor(4), 6) == ()


def test_whole_counts_are_the_best_of_all_and_never_beat_the_relaxed_ones() -> None:
    chance = random.Random(4)
    for _ in range(30):
        room = np.array([chance.randint(1, 5), chance.randint(1, 5)])
        devices = np.array([[chance.randint(0, 2), chance.randint(0, 2)] for _ in range(3)])
        devices[devices.sum(axis=1) == 0, 0] = 1
        capacity = [float(chance.randint(1, 20)) for _ in range(3)]
        limits = Limits(room=room)
        counts = whole(capacity, devices, limits)
        bound = relaxed(np.array(capacity), devices, limits)
        assert counts is not None
        assert bound is not None
        tried = [
            sum(c * n for c, n in zip(capacity, option, strict=True))
            for option in product(range(6), repeat=3)
            if np.all(np.array(option) @ devices <= room)
        ]
        assert sum(c * n for c, n in zip(capacity, counts, strict=True)) == pytest.approx(max(tried), rel=2e-3)
        assert max(tried) <= bound.samples * (1 + 1e-9)


def test_of_columns_with_the_same_devices_the_best_are_kept() -> None:
    devices = np.array([[1, 0], [1, 0], [0, 1], [1, 0]])
    capacity = np.array([1.0, 3.0, 2.0, 3.0])
    assert best_per_devices(capacity, devices).tolist() == [1, 2]
    assert best_per_devices(capacity, devices, most=2).tolist() == [1, 2, 3]

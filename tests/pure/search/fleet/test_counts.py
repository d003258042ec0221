"""The knapsack against all counts, and the widths of stages."""

from __future__ import annotations

import random
from itertools import product

import numpy as np
import pytest

from heterodyne.cost.layers import Widths
from heterodyne.search.fleet.counts import Limits, best_per_devices, relaxed, whole
from heterodyne.search.fleet.kinds import usable_widths


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

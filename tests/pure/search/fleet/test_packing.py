"""The linear program over few rows against HiGHS, as columns are added."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.optimize import linprog

from heterodyne.search.fleet.counts import Packing


def test_as_much_as_the_library_finds_at_prices_that_prove_it() -> None:
    chance = np.random.default_rng(0)
    for _ in range(20):
        rows = int(chance.integers(1, 7))
        room = chance.integers(0, 20, rows).astype(float)
        packing = Packing(room)
        samples, needs = np.zeros(0), np.zeros((rows, 0))
        for _ in range(6):
            own, need = float(chance.integers(1, 50)), chance.integers(0, 4, rows).astype(float)
            need[chance.integers(rows)] += 1
            packing.add(np.array([own]), need[:, None])
            samples, needs = np.append(samples, own), np.column_stack([needs, need])
            most, prices = packing.most()
            assert prices is not None
            assert most == pytest.approx(-linprog(-samples, A_ub=needs, b_ub=room).fun)
            assert np.all(prices >= 0)
            assert np.all(prices @ needs >= samples - 1e-6)
            assert most == pytest.approx(prices @ room)

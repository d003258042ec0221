"""What devices compute while links are measured."""

from __future__ import annotations

from statistics import fmean
from typing import Any

import pytest
import torch

from heterodyne.measure.beside import BETWEEN_S, moment
from heterodyne.measure.workbench import Workbench
from measure.fake_device import FakeClock

PRODUCT_S = 1e-4


def test_moments_vary_alike_on_all_ranks_and_are_as_long_in_the_mean(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else each collective would begin at the same moment of a period in which a held device stands still."""

    def seconds_of(speed: float) -> list[float]:
        clock = FakeClock()
        product = lambda: clock.run(PRODUCT_S / speed)  # noqa: E731
        monkeypatch.setattr("heterodyne.measure.beside.matrix_product", lambda _: product)
        peers: Any = type("Peers", (), {"barrier": lambda _: None})()
        compute = moment(peers, Workbench(device=torch.device("cpu"), clock=clock))
        found = []
        for _ in range(200):
            began = clock.now()
            compute()
            found.append(clock.now() - began)
        return found

    quick, slow = seconds_of(2.0), seconds_of(0.5)
    assert fmean(quick) == pytest.approx(BETWEEN_S, rel=0.1)
    assert max(quick) > 2 * min(quick)
    assert quick == pytest.approx(slow, abs=PRODUCT_S / 0.5)

"""How long something takes that several ranks do together, by the moments at which each comes and goes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from heterodyne.measure.clock import HostClock
from heterodyne.measure.repeats import together
from heterodyne.measure.sampling import Sampling
from heterodyne.measure.workbench import Workbench

OTHER = [(0.0, 7.0), (20.0, 29.0)]
"""When the other rank comes to each of two runs and goes; here the first run takes from 2 to 6 and the second one from 24 to 31."""
MOMENTS = (2.0, 6.0, 24.0, 31.0)


class Rank:
    """One of two; the other one reads another clock if ``one_clock`` is false."""

    rank, world_size = 0, 2

    def __init__(self, *, one_clock: bool) -> None:
        self._one_clock = one_clock

    def barrier(self) -> None:
        return

    def broadcast_object(self, value: Any, source: int) -> Any:
        return value

    def all_gather_object(self, value: Any) -> list[Any]:
        if isinstance(value, str):
            return [value, value if self._one_clock else "another machine"]
        return [value, [OTHER] * len(value)]


class Told(HostClock):
    """A second for each run that warms up, then the moments above."""

    def __init__(self, moments: Iterator[float]) -> None:
        self._moments = moments

    def mark(self) -> float:
        return next(self._moments)


@pytest.mark.parametrize(("one_clock", "lasts_s"), [(True, (5.0 + 7.0) / 2), (False, (4.0 + 7.0) / 2)])
def test_a_collective_lasts_from_the_last_to_come_until_the_last_to_go(
    monkeypatch: pytest.MonkeyPatch, one_clock: bool, lasts_s: float
) -> None:
    """Without a clock in common nobody knows when another one came, and who takes least time has waited least."""
    boot: Any = type("Boot", (), {"read_text": lambda _: "this machine"})()
    monkeypatch.setattr("heterodyne.measure.repeats._BOOT", boot)
    warm_up = [float(n) for n in range(6)]
    clock = Told(iter([*warm_up, *MOMENTS]))
    sampling = Sampling(samples=1, sample_s=2.0)
    bench = Workbench(device=torch.device("cpu"), sampling=sampling, clock=clock)
    peers: Any = Rank(one_clock=one_clock)
    found = together(peers, lambda: None, bench, source=0, left_s=100.0, between=(lambda: None, 0.0))
    assert found is not None
    assert found.seconds == pytest.approx(lasts_s)

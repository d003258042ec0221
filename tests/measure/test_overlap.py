"""What a collective takes from the computation beside it, on a device whose clock is made of numbers."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from heterodyne.measure.collectives import measure_overlap
from heterodyne.measure.sampling import Sampling
from heterodyne.measure.workbench import Workbench
from measure.fake_device import FakeClock

COLLECTIVE_S, UNIT_S = 1e-3, 1e-6


class Together:
    """Two ranks, of which this one computes at a part of its speed while a collective is in flight; also the channel."""

    rank, world_size = 0, 2

    def __init__(self, clock: FakeClock, lost: float) -> None:
        self._clock, self._lost = clock, lost
        self._over_s = 0.0

    def barrier(self) -> None:
        return

    def broadcast_object(self, value: Any, source: int) -> Any:
        return value

    def buffers(self, shapes: Sequence[tuple[int, torch.dtype]]) -> list[torch.Tensor]:
        return [torch.zeros(size, dtype=dtype) for size, dtype in shapes]

    def all_reduce(self, tensor: torch.Tensor) -> Together:
        self._over_s = self._clock.time + COLLECTIVE_S
        return self

    def wait(self) -> None:
        self._clock.time = max(self._clock.time, self._over_s)

    def compute(self) -> None:
        in_flight = self._clock.time < self._over_s
        self._clock.run(UNIT_S / (1 - self._lost) if in_flight else UNIT_S)


@pytest.mark.parametrize("lost", [0.0, 0.25, 0.9])
def test_the_overlap_is_what_is_lost_of_each_second_in_flight(lost: float) -> None:
    clock = FakeClock()
    peers: Any = Together(clock, lost)
    bench = Workbench(device=torch.device("cpu"), sampling=Sampling(sample_s=0.01), clock=clock)
    assert measure_overlap(peers, peers, bench, compute=peers.compute) == pytest.approx(lost, abs=0.02)


@pytest.mark.parametrize("copies", [True, False])
def test_on_a_processor_what_a_collective_computes_is_lost_and_what_it_waits_is_not(copies: bool) -> None:
    class Copying(Together):
        def all_reduce(self, tensor: torch.Tensor) -> Together:
            began = time.process_time()
            while copies and time.process_time() < began + 2 * COLLECTIVE_S:
                pass
            if not copies:
                time.sleep(2 * COLLECTIVE_S)
            return self

    peers: Any = Copying(FakeClock(), 0.0)
    bench = Workbench(device=torch.device("cpu"), sampling=Sampling(sample_s=0.01))
    assert (measure_overlap(peers, peers, bench) > 0.5) == copies

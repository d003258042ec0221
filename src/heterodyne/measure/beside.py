"""What devices compute while links are measured, and how much of a processor they get for it."""

from __future__ import annotations

import random
import time
from collections.abc import Callable

import torch

from heterodyne.measure.clock import HostClock, ProcessorClock
from heterodyne.measure.peers import Peers
from heterodyne.measure.workbench import Workbench

__all__ = ["BETWEEN_S", "GUESS", "matrix_product", "moment", "rate", "rate_of", "stretch", "varied"]

BETWEEN_S = 0.01
"""Of computing between two collectives, as in steps."""
GUESS = 10
"""Products are timed together at first, to see how many it takes."""
_MATRIX = 192
_VARIED = (0.5, 1.5)
"""Times that, at random."""


def moment(peers: Peers, bench: Workbench) -> Callable[[], None]:
    """Computes for about `BETWEEN_S`, by this device's own speed: a `stretch` of a `varied` length each time. Collective."""
    compute, chance = stretch(peers, bench), random.Random(bench.seed)
    return lambda: compute(varied(chance))


def varied(chance: random.Random) -> float:
    """A random length for a `stretch`, in units of `BETWEEN_S`; equal on all ranks that draw from the same seed.

    A CPU quota stops a process once every period. With stretches of one length, every collective would start at the same point of it.
    """
    return chance.uniform(*_VARIED)


def stretch(peers: Peers, bench: Workbench) -> Callable[[float], None]:
    """Computes for about `BETWEEN_S` so many times, by this device's own speed while all compute. Collective."""
    clock, work = bench.stopwatch, matrix_product(bench.device)

    def computing_s(times: int) -> float:
        start = clock.mark()
        for _ in range(times):
            work()
        return clock.seconds(start, clock.mark())

    peers.barrier()
    some = max(1, round(bench.sampling.sample_s / max(computing_s(GUESS) / GUESS, 1e-6)))
    times = max(1, round(BETWEEN_S * some / max(computing_s(some), 1e-6)))

    def compute(length: float) -> None:
        for _ in range(max(1, round(times * length))):
            work()

    return compute


def matrix_product(device: torch.device) -> Callable[[], object]:
    """Something to compute that is over soon."""
    a, b = torch.ones(_MATRIX, _MATRIX, device=device), torch.ones(_MATRIX, _MATRIX, device=device)
    return lambda: torch.mm(a, b)


def rate(peers: Peers, bench: Workbench) -> float:
    """Seconds of a processor that this rank gets in a second while all compute; 0 where some device is none of a host."""
    hosts = all(peers.all_gather_object(isinstance(bench.stopwatch, HostClock)))
    if not hosts:
        return 0.0
    work, until = matrix_product(bench.device), bench.sampling.section_s

    def compute() -> None:
        began = time.perf_counter()
        while time.perf_counter() - began < until:
            work()

    peers.barrier()
    return rate_of(compute)


def rate_of(compute: Callable[[], object]) -> float:
    """Return the ratio of the processor's seconds to those of the clock."""
    processor, wall = ProcessorClock(), HostClock()
    start, began = processor.mark(), wall.mark()
    compute()
    return processor.seconds(start, processor.mark()) / max(wall.seconds(began, wall.mark()), 1e-9)

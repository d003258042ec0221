"""A device made of numbers: its clock moves only when a block runs on it, so that what is timed is known exactly."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import nn

from heterodyne.measure.sampling import Sampling
from heterodyne.measure.workbench import Workbench


class FakeClock:
    """Also the wall clock. ``factor`` slows everything down, ``noise`` gives the factor of each single run.

    While ``put_off`` is not 0, backwards leave that part of their work undone: ``left_s``.
    """

    def __init__(self, noise: Callable[[int], float] = lambda _: 1.0) -> None:
        self.time = 0.0
        self.factor = 1.0
        self.runs = 0
        self.put_off = self.left_s = 0.0
        self._noise = noise

    def mark(self) -> float:
        return self.time

    def seconds(self, start: float, end: float) -> float:
        return end - start

    def wait(self) -> None:
        return

    def now(self) -> float:
        return self.time

    def run(self, seconds: float) -> None:
        self.time += seconds * self.factor * self._noise(self.runs)
        self.runs += 1


class CpuClock:
    """The CPU time of this process: real work on a real machine, but what others do there does not count."""

    def mark(self) -> float:
        return time.process_time()

    def seconds(self, start: float, end: float) -> float:
        return end - start

    def wait(self) -> None:
        return


class _Timed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, clock, forward_s, backward_s):  # type: ignore[no-untyped-def]
        clock.run(forward_s)
        ctx.clock, ctx.backward_s = clock, backward_s
        return x * 1.0

    @staticmethod
    def backward(ctx, gradient):  # type: ignore[no-untyped-def]
        clock = ctx.clock
        clock.run(ctx.backward_s * (1 - clock.put_off))
        clock.left_s += ctx.backward_s * clock.put_off
        return gradient, torch.zeros(1), None, None, None


class _FakeBlock(nn.Module):
    def __init__(self, clock: FakeClock, forward_s: float, backward_s: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self._clock, self._forward_s, self._backward_s = clock, forward_s, backward_s

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = _Timed.apply(x, self.weight, self._clock, self._forward_s, self._backward_s)
        return result


class FakeProgram:
    """``base_s + per_sample_s * size`` forward, twice that backward; out of memory above ``most``."""

    def __init__(self, clock: FakeClock, base_s: float, per_sample_s: float, most: int = 10**9) -> None:
        self._clock, self._base_s, self._per_sample_s, self._most = clock, base_s, per_sample_s, most

    def forward_s(self, size: int) -> float:
        return self._base_s + self._per_sample_s * size

    def instantiate(self, batch: int, device: torch.device, *, seed: int = 0) -> tuple[nn.Module, list[torch.Tensor]]:
        if batch > self._most:
            raise torch.OutOfMemoryError("no more")
        seconds = self.forward_s(batch)
        x = torch.zeros(batch, 4, device=device).requires_grad_()
        return _FakeBlock(self._clock, seconds, 2 * seconds), [x]


def bench_of(clock: FakeClock, **changes: object) -> Workbench:
    values: dict[str, object] = {
        "device": torch.device("cpu"),
        "clock": clock,
        "now": clock.now,
        "sampling": Sampling(),
        **changes,
    }
    return Workbench(**values)  # type: ignore[arg-type]


def until(condition: Callable[[], bool], limit_s: float = 60.0) -> None:
    """Return when something has come about in another thread; the limit only keeps a broken test from hanging."""
    deadline = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError("what was waited for never came about")
        time.sleep(0.001)

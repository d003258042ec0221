"""What is left of a step when passes and update are taken away, on a device of known costs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from heterodyne.measure.step_overhead import LoneSteps, measure_step_overhead
from measure.fake_device import FakeClock, FakeProgram, bench_of


def steps_of(clock: FakeClock, program: FakeProgram, *, update_s: float, besides_s: float) -> LoneSteps:
    @contextmanager
    def steps(size: int) -> Iterator[Callable[[], object]]:
        yield lambda: clock.run(3 * program.forward_s(size) + update_s + besides_s)

    return steps


@pytest.mark.parametrize("besides_s", [0.0, 0.004])
@pytest.mark.parametrize("size", [1, 4])
def test_what_is_neither_passes_nor_update_is_left(besides_s: float, size: int) -> None:
    clock = FakeClock()
    program = FakeProgram(clock, 0.002, 0.001)
    steps = steps_of(clock, program, update_s=0.003, besides_s=besides_s)
    found = measure_step_overhead(program, steps, size, bench_of(clock), update_s=0.003)
    assert found == pytest.approx(besides_s, abs=1e-9)


def test_a_machine_that_slows_down_meanwhile_does_not_count_as_overhead() -> None:
    """Passes and steps take turns, so both are slowed."""
    clock = FakeClock(noise=lambda run: 1.0 if run < 50 else 1.5)
    program = FakeProgram(clock, 0.0, 0.005)
    steps = steps_of(clock, program, update_s=0.0, besides_s=0.0)
    assert measure_step_overhead(program, steps, 1, bench_of(clock), update_s=0.0) == pytest.approx(0.0, abs=1e-3)


def test_a_model_that_does_not_fit_has_none_and_one_that_cannot_be_trained_alone_says_so() -> None:
    clock, said = FakeClock(), list[str]()
    program = FakeProgram(clock, 0.002, 0.001)

    @contextmanager
    def refused(_: int) -> Iterator[Callable[[], object]]:
        raise RuntimeError("no weights yet")
        yield lambda: None

    assert measure_step_overhead(None, refused, 1, bench_of(clock, say=said.append), update_s=0.0) == 0
    assert not said
    assert measure_step_overhead(program, refused, 1, bench_of(clock, say=said.append), update_s=0.0) == 0
    assert "was not measured: RuntimeError: no weights yet" in said[0]

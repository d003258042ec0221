"""A rank's pace is the time of its own work: what it waits for others is not in it."""

from __future__ import annotations

import pytest
import torch

from heterodyne.drop_in import pace as module
from heterodyne.drop_in.pace import Pace


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now

    def passes(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    return clock


def step(
    pace: Pace,
    clock: Clock,
    *,
    own: float,
    batch_norm: float = 0.0,
    early: float = 0.0,
    waits: float = 0.0,
    samples: int,
) -> None:
    pace.note_forward(samples)
    with pace:
        clock.passes(batch_norm)
    clock.passes(own / 2)
    if early:
        pace.note_end()  # of a bucket that is launched before the last one
    clock.passes(own / 2)
    pace.note_launch()
    clock.passes(waits / 2)
    pace.note_end()
    clock.passes(waits / 2)
    pace.note_end()


def test_waiting_is_left_out(clock: Clock) -> None:
    pace = Pace(torch.device("cpu"))
    step(pace, clock, own=100.0, samples=4)  # the first one warms up
    for waits in (0.0, 5.0, 70.0):
        assert not pace.is_due
        step(pace, clock, own=8.0, batch_norm=waits, early=1.0, waits=waits, samples=4)
    assert pace.is_due
    sample_s, seconds = pace.take()
    assert sample_s == pytest.approx(2.0)
    assert seconds == pytest.approx(24.0)
    assert not pace.is_due


def test_a_rank_that_does_something_else_for_once_keeps_its_pace(clock: Clock) -> None:
    pace = Pace(torch.device("cpu"))
    for own in (1.0, 8.0, 500.0, 8.0):
        step(pace, clock, own=own, samples=2)
    assert pace.take()[0] == pytest.approx(4.0)


def test_samples_of_all_micro_batches_count(clock: Clock) -> None:
    pace = Pace(torch.device("cpu"))
    for _ in range(4):
        pace.note_forward(3)
        step(pace, clock, own=8.0, samples=1)
    assert pace.take()[0] == pytest.approx(2.0)


@pytest.mark.parametrize("ends_early", [False, True])
def test_two_models_in_one_backward_are_one_step(clock: Clock, ends_early: bool) -> None:
    """Whether the buckets of the first are reduced before the second is ready may differ between ranks; the number of steps may not."""
    pace = Pace(torch.device("cpu"))
    for number in range(4):
        assert not pace.is_due, number
        pace.note_forward(2)
        clock.passes(4.0)
        pace.note_launch()
        if ends_early:
            pace.note_end()
        clock.passes(2.0)
        pace.note_launch()
        pace.note_end()
        clock.passes(1.0)
    assert pace.is_due
    assert pace.take()[0] == pytest.approx(3.5)

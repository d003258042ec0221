"""Timing short work: what the median forgives, and why a throttled device needs samples that span many of its periods."""

from __future__ import annotations

import random
from statistics import median, pstdev

import pytest

from heterodyne.errors import MeasureError
from heterodyne.measure.sampling import Sampling, sample, summarise
from measure.fake_device import FakeClock


def runs(clock: FakeClock, *laps: float) -> object:
    def work() -> tuple[float, ...]:
        marks = [clock.mark()]
        for lap in laps:
            clock.run(lap)
            marks.append(clock.mark())
        return tuple(marks)

    return work


def test_each_lap_is_timed_for_itself() -> None:
    clock = FakeClock()
    timing = sample(runs(clock, 0.001, 0.0, 0.002), clock, Sampling())
    assert timing.laps == pytest.approx((0.001, 0.0, 0.002))
    assert timing.seconds == pytest.approx(0.003)
    assert timing.spread == pytest.approx(0.0, abs=1e-9)


def test_warm_up_is_not_counted() -> None:
    clock = FakeClock(noise=lambda run: 1000.0 if run < 2 else 1.0)
    assert sample(runs(clock, 0.001), clock, Sampling(warm_up=2)).seconds == pytest.approx(0.001)
    assert clock.runs > 2


@pytest.mark.tour("measure/")
@pytest.mark.parametrize("every", [7, 11])
def test_the_median_forgives_samples_that_something_else_disturbed(every: int) -> None:
    """One long run in each few, of a length that is a sample by itself."""
    clock = FakeClock(noise=lambda run: 50.0 if run % every == 3 else 1.0)
    timing = sample(runs(clock, 0.1), clock, Sampling(samples=every * 2))
    assert timing.seconds == pytest.approx(0.1)


def test_a_disturbance_that_ends_is_outvoted() -> None:
    """Three of the first five samples take twice as long: their median would be wrong, so more are taken."""
    clock = FakeClock(noise=lambda run: 2.0 if run < 4 else 1.0)
    assert sample(runs(clock, 0.04), clock, Sampling(warm_up=1)).seconds == pytest.approx(0.04)


def test_noise_that_stays_is_not_waited_for() -> None:
    clock = FakeClock(noise=lambda run: 1.0 + run % 3)
    sampling = Sampling(warm_up=0)
    timing = sample(runs(clock, 0.04), clock, sampling)
    assert timing.seconds == pytest.approx(0.08)
    assert timing.spread > sampling.steady
    assert clock.time < 2 * sampling.patience * sampling.section_s


def test_the_spread_tells_how_much_samples_differ() -> None:
    assert summarise([(1.0,), (1.0,), (1.0,)]).spread == 0
    assert summarise([(1.0,), (2.0,), (3.0,), (4.0,), (5.0,)]).spread == pytest.approx(2 / 3)


class ThrottledClock(FakeClock):
    """A device that computes 1 ms in each period of 4 ms and stands still for the rest; counted in whole nanoseconds."""

    PERIOD, QUOTA = 4_000_000, 1_000_000

    def run(self, seconds: float) -> None:
        now, left = round(self.time * 1e9), round(seconds * 1e9)
        while left > 0:
            inside = now % self.PERIOD
            if inside >= self.QUOTA:
                now += self.PERIOD - inside
            else:
                part = min(left, self.QUOTA - inside)
                now += part
                left -= part
        self.time = now / 1e9


@pytest.mark.parametrize("run_s", [0.0001, 0.0003, 0.0007, 0.0025, 0.013])
def test_a_throttled_device_is_as_slow_as_it_is_on_average(run_s: float) -> None:
    """Alone, a run of 0.3 ms takes 0.3 ms or 3.3 ms; over many periods it takes four times its time, and that is the answer."""
    clock = ThrottledClock()
    timing = sample(runs(clock, run_s / 3, 2 * run_s / 3), clock, Sampling())
    assert timing.seconds == pytest.approx(4 * run_s, rel=0.1)


def test_a_sample_spans_its_time_and_a_section_its_own() -> None:
    clock = FakeClock()
    sampling = Sampling(warm_up=1, sample_s=0.04, samples=5, section_s=1.0)
    timing = sample(runs(clock, 0.003), clock, sampling)
    assert timing.samples * 0.04 <= clock.time
    assert clock.time >= 1.0


def test_long_runs_are_repeated_twice_if_they_agree_and_three_times_if_not() -> None:
    """They average over disturbances by themselves, and a first long run is warm-up enough."""
    clock = FakeClock()
    assert sample(runs(clock, 2.0), clock, Sampling()).samples == 2
    assert clock.runs == 1 + 2
    clock = FakeClock(noise=lambda run: 1.0 + 0.3 * (run % 2))
    assert sample(runs(clock, 2.0), clock, Sampling()).samples == 3


def test_work_that_ran_before_and_is_long_is_warm() -> None:
    clock = FakeClock()
    sample(runs(clock, 2.0), clock, Sampling(), run_s=2.0)
    assert clock.runs == 2
    clock = FakeClock()
    few = Sampling(warm_up=2, samples=1, section_s=0.0, most_samples=1, sample_s=0.0)
    sample(runs(clock, 0.001), clock, few, run_s=0.001)
    assert clock.runs == 2 + 1


@pytest.mark.parametrize("run_s", [0.001, 0.03, 0.3, 0.7, 5.0])
def test_the_least_that_a_section_takes(run_s: float) -> None:
    clock = FakeClock()
    sampling = Sampling()
    sample(runs(clock, run_s), clock, sampling, run_s=run_s, budget_s=0.0)
    assert sampling.least_s(run_s) <= 1.001 * clock.time
    assert clock.time <= 1.001 * (sampling.least_s(run_s) + run_s)  # a sample ends with a whole run


def test_the_error_of_the_median_falls_with_the_root_of_the_number_of_samples() -> None:
    """Against the definition: many medians of n samples of a normal distribution, and how far they scatter."""
    chance = random.Random(1)
    for n in (9, 36):
        medians = [median(chance.gauss(1.0, 0.1) for _ in range(n)) for _ in range(2000)]
        errors = [summarise([(chance.gauss(1.0, 0.1),) for _ in range(n)]).error for _ in range(200)]
        assert sum(errors) / len(errors) == pytest.approx(pstdev(medians), rel=0.2)


def test_a_steady_section_ends_early_and_an_unsteady_one_when_its_median_is_known() -> None:
    steady, noisy = FakeClock(), FakeClock(noise=lambda run: 1.0 + 0.1 * (run % 5))
    sampling = Sampling()
    first = sample(runs(steady, 0.04), steady, sampling)
    second = sample(runs(noisy, 0.04), noisy, sampling)
    assert first.samples < second.samples
    assert second.error <= sampling.steady
    assert second.spread > sampling.steady


def test_the_budget_ends_a_section_but_leaves_one_sample() -> None:
    clock = FakeClock()
    assert sample(runs(clock, 1.0), clock, Sampling(samples=100, most_samples=100), budget_s=10).samples <= 10
    assert sample(runs(clock, 1.0), clock, Sampling(), budget_s=0).samples == 1


def test_work_that_takes_no_time_comes_to_an_end() -> None:
    clock = FakeClock()
    with pytest.raises(MeasureError, match="no time"):
        sample(runs(clock, 0.0), clock, Sampling())

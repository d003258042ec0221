"""The rounds of a pipeline against the clock of the schedules, and against theory."""

from __future__ import annotations

import random

import pytest

from heterodyne.plan.schedules import SCHEDULES
from heterodyne.plan.schedules.clock import play
from heterodyne.plan.schedules.times import Read, StageTimes
from heterodyne.search.fleet.makespan import Makespans, StageSeconds


def _stages(chance: random.Random, count: int) -> list[StageSeconds]:
    send = chance.choice([0.0, 0.1, 2.0])
    return [
        StageSeconds(
            forward_s=chance.uniform(0.5, 2.0),
            backward_s=chance.uniform(0.5, 4.0),
            send_s=chance.uniform(0.0, send),
        )
        for _ in range(count)
    ]


def _clock_s(stages: list[StageSeconds], schedule: str, micro_batches: int) -> float:
    times = [StageTimes(forward_s=s.forward_s, input_s=s.backward_s, weight_s=0.0) for s in stages]
    reads = [
        Read(source=n, reader=n + 1, forward_s=stages[n].send_s, backward_s=stages[n].send_s)
        for n in range(len(stages) - 1)
    ]
    return play(SCHEDULES[schedule].orders(len(stages), 1, micro_batches), times, reads=reads).makespan_s


@pytest.mark.parametrize("schedule", ["1F1B", "GPipe"])
def test_rounds_are_what_the_clock_plays(schedule: str) -> None:
    chance = random.Random(1)
    for _ in range(150):
        stages = _stages(chance, chance.randint(1, 7))
        made = Makespans(stages, schedule)  # type: ignore[arg-type]
        for count in (*range(1, 10), 17, 60):
            assert made.seconds(count) == pytest.approx(_clock_s(stages, schedule, count), rel=1e-9)


def test_uniform_stages_take_what_theory_says() -> None:
    for schedule in ("1F1B", "GPipe"):
        for stages in (1, 2, 5):
            made = Makespans([StageSeconds(forward_s=1.0, backward_s=2.0)] * stages, schedule)  # type: ignore[arg-type]
            for count in (1, 3, 8, 1000):
                assert made.seconds(count) == pytest.approx((stages - 1 + count) * 3.0)


def test_the_bound_never_exceeds_the_played_time() -> None:
    chance = random.Random(2)
    for _ in range(200):
        stages = _stages(chance, chance.randint(1, 6))
        for schedule in ("1F1B", "GPipe"):
            made = Makespans(stages, schedule)  # type: ignore[arg-type]
            for count in range(1, 20):
                assert made.bound_s(count) <= made.seconds(count) * (1 + 1e-12)


def test_the_most_within_a_time_is_the_inverse() -> None:
    chance = random.Random(3)
    for _ in range(100):
        stages = _stages(chance, chance.randint(1, 5))
        made = Makespans(stages, chance.choice(["1F1B", "GPipe"]))  # type: ignore[arg-type]
        for count in (1, 4, 30):
            seconds = made.seconds(count)
            assert made.most_within(seconds, 1000) == count
            assert made.most_within(seconds * 0.999999, 1000) == count - 1
            assert made.most_within(seconds, count - 1) == count - 1

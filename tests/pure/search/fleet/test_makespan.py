"""The rounds of a pipeline against the clock of the schedules, and against theory."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from heterodyne.plan.schedules import SCHEDULES
from heterodyne.plan.schedules.clock import play
from heterodyne.plan.schedules.times import Read, StageTimes
from heterodyne.search.fleet.makespan import Makespans, StageSeconds

PLAIN = ("1F1B", "GPipe", "ZBH1", "ZBH2")
INTERLEAVED = ("Interleaved1F1B", "InterleavedZeroBubble")


def _stages(chance: random.Random, count: int) -> list[StageSeconds]:
    send = chance.choice([0.0, 0.1, 2.0])
    again = chance.choice([0.0, 1.0])
    return [
        StageSeconds(
            forward_s=forward_s,
            backward_s=chance.uniform(0.5, 4.0) + again * forward_s,
            send_s=chance.uniform(0.0, send),
            again_s=again * forward_s,
        )
        for forward_s in (chance.uniform(0.5, 2.0) for _ in range(count))
    ]


def _clock_s(stages: list[StageSeconds], schedule: str, micro_batches: int, chunks: int = 1) -> float:
    times = [
        StageTimes(
            forward_s=s.forward_s,
            input_s=(s.backward_s - s.again_s) / 2,
            weight_s=(s.backward_s - s.again_s) / 2,
            recompute_s=s.again_s,
        )
        for s in stages
    ]
    reads = [
        Read(source=n, reader=n + 1, forward_s=stages[n].send_s, backward_s=stages[n].send_s)
        for n in range(len(stages) - 1)
    ]
    return play(SCHEDULES[schedule].orders(len(stages) // chunks, chunks, micro_batches), times, reads=reads).makespan_s


@pytest.mark.parametrize("schedule", PLAIN)
def test_rounds_are_what_the_clock_plays(schedule: str) -> None:
    chance = random.Random(1)
    for _ in range(150):
        stages = _stages(chance, chance.randint(1, 7))
        made = Makespans(stages, schedule)  # type: ignore[arg-type]
        for count in (*range(1, 10), 17, 60):
            assert made.seconds(count) == pytest.approx(_clock_s(stages, schedule, count), rel=1e-9)


@pytest.mark.parametrize("schedule", INTERLEAVED)
def test_interleaved_orders_are_what_the_clock_plays(schedule: str) -> None:
    chance = random.Random(5)
    for _ in range(40):
        places, chunks = chance.randint(2, 5), chance.randint(1, 4)
        stages = _stages(chance, places * chunks)
        made = Makespans(stages, schedule, chunks)  # type: ignore[arg-type]
        for count in (1, places, places + 1, 2 * places - 1, 17, 64, chance.randint(65, 130), chance.randint(130, 200)):
            assert made.seconds(count) == pytest.approx(_clock_s(stages, schedule, count, chunks), rel=1e-9)


@pytest.mark.parametrize("schedule", [*PLAIN, *INTERLEAVED])
def test_a_long_row_of_micro_batches_is_played_in_part_and_none_the_less_exact(schedule: str) -> None:
    chance = random.Random(6)
    for places, chunks in ((2, 2), (3, 2), (4, 1)) if schedule in INTERLEAVED else ((2, 1), (3, 1), (5, 1)):
        stages = _stages(chance, places * chunks)
        # Where two places are about as slow, it takes long until only one decides.
        stages[-1] = replace(stages[-1], forward_s=8.0 * chunks)
        made = Makespans(stages, schedule, chunks)  # type: ignore[arg-type]
        for count in (400, 401, 402, 403):
            assert made.seconds(count) == pytest.approx(_clock_s(stages, schedule, count, chunks), rel=1e-9)
        whole = len(SCHEDULES[schedule].orders(places, chunks, 400)[0]) * places
        assert made.played[0] < 2 * whole, "no more than half of the orders of all four"


def test_zero_bubble_takes_what_theory_says() -> None:
    """Where F = I = W = 1: ZB-H1 waits p - 1 slots in all, ZB-H2 not at all on any place (Qi et al., 2024, table 1 and section 2.3)."""
    for stages in (2, 4, 6):
        same = [StageSeconds(forward_s=1.0, backward_s=2.0)] * stages
        for count in (2 * stages, 5 * stages):
            assert Makespans(same, "1F1B").seconds(count) == pytest.approx(3 * count + 3 * (stages - 1))
            assert Makespans(same, "ZBH1").seconds(count) == pytest.approx(3 * count + stages - 1)
            # The last place begins p - 1 slots late.
            assert Makespans(same, "ZBH2").seconds(count) == pytest.approx(3 * count + stages - 1)


def test_interleaving_divides_the_bubble_by_the_stages_on_a_place() -> None:
    """(p - 1) (F + B) / v (Narayanan et al., SC 2021, section 2.2), for whole rounds."""
    for places in (2, 4):
        for chunks in (1, 2, 4):
            own = [StageSeconds(forward_s=1.0 / chunks, backward_s=2.0 / chunks)] * (places * chunks)
            made = Makespans(own, "Interleaved1F1B", chunks)
            for count in (places, 3 * places):
                assert made.seconds(count) == pytest.approx(3 * count + 3 * (places - 1) / chunks)


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
        for schedule in PLAIN:
            made = Makespans(stages, schedule)  # type: ignore[arg-type]
            for count in range(1, 20):
                assert made.bound_s(count) <= made.seconds(count) * (1 + 1e-12)
        chunks = chance.randint(1, 3)
        stages = _stages(chance, chance.randint(2, 4) * chunks)
        for schedule in INTERLEAVED:
            made = Makespans(stages, schedule, chunks)  # type: ignore[arg-type]
            for count in range(1, 20):
                assert made.bound_s(count) <= made.seconds(count) * (1 + 1e-12)


def test_the_most_within_a_time_is_the_inverse() -> None:
    chance = random.Random(3)
    for _ in range(100):
        stages = _stages(chance, chance.randint(1, 5))
        made = Makespans(stages, chance.choice(PLAIN))  # type: ignore[arg-type]
        for count in (1, 4, 30):
            seconds = made.seconds(count)
            assert made.most_within(seconds, 1000) == count
            assert made.most_within(seconds * 0.999999, 1000) == count - 1
            assert made.most_within(seconds, count - 1) == count - 1

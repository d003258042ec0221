"""The rounds of a pipeline against the clock of the schedules, and against theory."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from heterodyne.plan.schedules import SCHEDULES
from heterodyne.plan.schedules.clock import play
from heterodyne.plan.schedules.makespans import Makespans
from heterodyne.plan.schedules.times import Read, StageTimes

PLAIN = ("1F1B", "GPipe", "ZBH1", "ZBH2")
INTERLEAVED = ("Interleaved1F1B", "InterleavedZeroBubble")
V_SHAPED = ("ZBVZeroBubble", "DualPipeV")


def _pipeline(chance: random.Random, count: int) -> tuple[list[StageTimes], list[float]]:
    """Stages, and the seconds of the messages between them."""
    send = chance.choice([0.0, 0.1, 2.0])
    again = chance.choice([0.0, 1.0])
    stages = [
        StageTimes(
            forward_s=forward_s,
            input_s=chance.uniform(0.2, 2.0),
            weight_s=chance.uniform(0.0, 2.0),
            recompute_s=again * forward_s,
        )
        for forward_s in (chance.uniform(0.5, 2.0) for _ in range(count))
    ]
    return stages, [chance.uniform(0.0, send) for _ in range(count - 1)]


def _clock_s(made: Makespans, micro_batches: int) -> float:
    reads = [Read(source=n, reader=n + 1, forward_s=s, backward_s=s) for n, s in enumerate(made.sends)]
    orders = SCHEDULES[made.schedule].orders(made.places, made.chunks, micro_batches)
    return play(orders, made.stages, reads=reads).makespan_s


def _alike(count: int, chunks: int = 1) -> tuple[list[StageTimes], list[float]]:
    """F = I = W = 1 / chunks, and messages take no time."""
    return [StageTimes.halved(forward_s=1.0 / chunks, backward_s=2.0 / chunks)] * count, [0.0] * (count - 1)


@pytest.mark.parametrize("schedule", PLAIN)
def test_rounds_are_what_the_clock_plays(schedule: str) -> None:
    chance = random.Random(1)
    for _ in range(60):
        made = Makespans(*_pipeline(chance, chance.randint(1, 7)), schedule)
        for count in (*range(1, 10), 17, 60):
            assert made.seconds(count) == pytest.approx(_clock_s(made, count), rel=1e-9)


@pytest.mark.parametrize("schedule", INTERLEAVED)
def test_interleaved_orders_are_what_the_clock_plays(schedule: str) -> None:
    chance = random.Random(5)
    for _ in range(20):
        places, chunks = chance.randint(2, 5), chance.randint(1, 4)
        made = Makespans(*_pipeline(chance, places * chunks), schedule, chunks)
        for count in (1, places, places + 1, 2 * places - 1, 17, 64, chance.randint(65, 130), chance.randint(130, 200)):
            assert made.seconds(count) == pytest.approx(_clock_s(made, count), rel=1e-9)


@pytest.mark.parametrize(
    ("schedule", "chunks"), [*((name, 2) for name in V_SHAPED), ("GPipe", 3), ("ShiftedCriticalPath", 1)]
)
def test_the_other_orders_are_what_the_clock_plays(schedule: str, chunks: int) -> None:
    chance = random.Random(7)
    for _ in range(12):
        places = chance.randint(2, 5)
        made = Makespans(*_pipeline(chance, places * chunks), schedule, chunks)
        for count in (1, places, 2 * places - 1, 17, 64, chance.randint(65, 130), chance.randint(130, 200)):
            assert made.seconds(count) == pytest.approx(_clock_s(made, count), rel=1e-9)


@pytest.mark.parametrize("schedule", [*PLAIN, *INTERLEAVED, "ZBVZeroBubble"])
def test_a_long_row_of_micro_batches_is_played_in_part_and_none_the_less_exact(schedule: str) -> None:
    chance = random.Random(6)
    shapes = {"1": ((2, 1), (3, 1), (5, 1)), "several": ((2, 2), (3, 2), (4, 1)), "v": ((2, 2), (3, 2))}
    own = "several" if schedule in INTERLEAVED else "v" if schedule in V_SHAPED else "1"
    for places, chunks in shapes[own]:
        stages, sends = _pipeline(chance, places * chunks)
        # Where two places are about as slow, it takes long until only one decides.
        stages[-1] = replace(stages[-1], forward_s=8.0 * chunks)
        made = Makespans(stages, sends, schedule, chunks)
        for count in (400, 401, 402, 403):
            assert made.seconds(count) == pytest.approx(_clock_s(made, count), rel=1e-9)
        whole = len(SCHEDULES[schedule].orders(places, chunks, 400)[0]) * places
        assert made.played[0] < 2 * whole, "no more than half of the orders of all four"


def test_zero_bubble_takes_what_theory_says() -> None:
    """Where F = I = W = 1: ZB-H1 waits p - 1 slots in all, ZB-H2 not at all on any place (Qi et al., 2024, table 1 and section 2.3)."""
    for stages in (2, 4, 6):
        for count in (2 * stages, 5 * stages):
            assert Makespans(*_alike(stages), "1F1B").seconds(count) == pytest.approx(3 * count + 3 * (stages - 1))
            assert Makespans(*_alike(stages), "ZBH1").seconds(count) == pytest.approx(3 * count + stages - 1)
            # The last place begins p - 1 slots late.
            assert Makespans(*_alike(stages), "ZBH2").seconds(count) == pytest.approx(3 * count + stages - 1)


def test_interleaving_divides_the_bubble_by_the_stages_on_a_place() -> None:
    """(p - 1) (F + B) / v (Narayanan et al., SC 2021, section 2.2), for whole rounds."""
    for places in (2, 4):
        for chunks in (1, 2, 4):
            made = Makespans(*_alike(places * chunks, chunks), "Interleaved1F1B", chunks)
            for count in (places, 3 * places):
                assert made.seconds(count) == pytest.approx(3 * count + 3 * (places - 1) / chunks)


def test_uniform_stages_take_what_theory_says() -> None:
    for schedule in ("1F1B", "GPipe"):
        for stages in (1, 2, 5):
            made = Makespans(*_alike(stages), schedule)
            for count in (1, 3, 8, 1000):
                assert made.seconds(count) == pytest.approx((stages - 1 + count) * 3.0)


def test_the_bound_never_exceeds_the_played_time() -> None:
    chance = random.Random(2)
    for _ in range(60):
        pipeline = _pipeline(chance, chance.randint(1, 6))
        for schedule in PLAIN:
            made = Makespans(*pipeline, schedule)
            for count in range(1, 20):
                assert made.bound_s(count) <= made.seconds(count) * (1 + 1e-12)
        chunks = chance.randint(1, 3)
        pipeline = _pipeline(chance, chance.randint(2, 4) * chunks)
        for schedule in INTERLEAVED:
            made = Makespans(*pipeline, schedule, chunks)
            for count in range(1, 20):
                assert made.bound_s(count) <= made.seconds(count) * (1 + 1e-12)


@pytest.mark.parametrize("schedule", INTERLEAVED)
def test_no_fewer_actions_are_played_than_is_said(schedule: str) -> None:
    chance = random.Random(8)
    for count in (0, 1, 3, 8, 50, 400, 401):
        places, chunks = chance.randint(2, 4), chance.randint(2, 3)
        made = Makespans(*_pipeline(chance, places * chunks), schedule, chunks)
        made.seconds(count)
        assert made.fewest_actions(count) <= made.played[0]


def test_the_most_within_a_time_is_the_inverse() -> None:
    chance = random.Random(3)
    for _ in range(100):
        made = Makespans(*_pipeline(chance, chance.randint(1, 5)), chance.choice(PLAIN))
        for count in (1, 4, 30):
            seconds = made.seconds(count)
            assert made.most_within(seconds, 1000) == count
            assert made.most_within(seconds * 0.999999, 1000) == count - 1
            assert made.most_within(seconds, count - 1) == count - 1


@pytest.mark.parametrize("schedule", PLAIN)
def test_a_slow_link_is_busy_with_all_messages(schedule: str) -> None:
    """Of three stages of a second each way, over links that a message keeps for 0.2 s and for 5 s."""
    stages = [StageTimes.halved(forward_s=1.0, backward_s=2.0)] * 3
    made = Makespans(stages, [0.2, 5.0], schedule, busy=[0.2, 5.0])
    free = Makespans(stages, [0.2, 5.0], schedule)
    assert made.seconds(1) == pytest.approx(free.seconds(1))
    for count in (8, 64, 65):
        assert made.seconds(count) >= free.seconds(count)
        assert made.seconds(count) >= made.bound_s(count)
        # Before the first message a forward, behind the last one the other two, the backwards, and the messages but this one.
        back = 3 * 1.0 if SCHEDULES[schedule].halves else 3 * 2.0
        assert made.seconds(count) == pytest.approx(
            max(free.seconds(count), 3 * 1.0 + back + 2 * 5.2 - 5.0 + 5 * count)
        )

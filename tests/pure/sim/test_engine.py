"""The engine: in-order lanes, tasks that wait, tasks on several lanes, and lanes that slow each other."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from heterodyne.sim import Deadlock, Engine

WORKS = st.lists(st.floats(0, 10), min_size=1, max_size=8)
#: tasks as (work, lanes, how far back each task that it waits for stands)
TASKS = st.lists(
    st.tuples(
        st.integers(0, 6).map(float),
        st.lists(st.integers(0, 2), min_size=1, max_size=2, unique=True),
        st.lists(st.integers(1, 5), max_size=2),
    ),
    min_size=1,
    max_size=14,
)
Tasks = list[tuple[float, list[int], list[int]]]


def built(tasks: Tasks, losses: dict[tuple[int, int], float] | None = None) -> Engine:
    engine = Engine(3)
    for number, (work, lanes, back) in enumerate(tasks):
        engine.task(work, lanes, [number - b for b in back if b <= number])
    for (lane, busy), loss in (losses or {}).items():
        engine.slow(lane, busy, loss)
    return engine


def expected(tasks: Tasks) -> list[float]:
    """The longest path to each end, by the definition: a task starts at the last end among those that it waits for."""
    end: list[float] = []
    for number, (work, lanes, back) in enumerate(tasks):
        before = [end[n] for n in range(number) if set(tasks[n][1]) & set(lanes)]
        before += [end[number - b] for b in back if b <= number]
        end.append(max(before, default=0.0) + work)
    return end


@given(TASKS)
def test_without_slowing_every_end_is_the_longest_path_to_it(tasks: Tasks) -> None:
    engine = built(tasks)
    assert engine.run() == max(expected(tasks))
    assert engine.end == expected(tasks)


@given(TASKS, st.floats(0, 1))
def test_lanes_that_slow_each_other_lose_time_but_never_gain(tasks: Tasks, loss: float) -> None:
    engine = built(tasks, {(0, 1): loss})
    engine.run()
    assert all(slow >= free - 1e-9 for slow, free in zip(engine.end, expected(tasks), strict=True))


@given(TASKS)
def test_a_loss_of_nothing_plays_as_if_there_were_none(tasks: Tasks) -> None:
    """Lane 2 is slowed, by so little that it rounds away: the two loops of the engine have to agree."""
    engine = built(tasks, {(0, 1): 0.0, (2, 1): 5e-324})
    engine.run()
    assert engine.end == pytest.approx(expected(tasks), rel=1e-12, abs=1e-12)


@given(st.floats(0.1, 10), st.floats(0, 10), st.floats(0, 10), st.floats(0, 0.95))
def test_seconds_lost_are_loss_times_seconds_together(work: float, late: float, busy: float, loss: float) -> None:
    engine = Engine(3)
    victim = engine.task(work, [0])
    start = engine.task(late, [2])
    engine.task(busy, [1], [start])
    engine.slow(0, 1, loss)
    engine.run()
    if late >= work:
        assert engine.end[victim] == pytest.approx(work)
    else:
        together = min(busy, (work - late) / (1 - loss))
        assert engine.end[victim] == pytest.approx(work + loss * together)


def test_a_lane_may_stand_still() -> None:
    engine = Engine(2)
    victim, busy = engine.task(1.0, [0]), engine.task(3.0, [1])
    engine.slow(0, 1, 1.0)
    assert engine.run() == 4.0
    assert (engine.end[victim], engine.end[busy]) == (4.0, 3.0)


def test_lanes_that_stop_each_other_are_a_deadlock() -> None:
    engine = Engine(2)
    tasks = (engine.task(1.0, [0]), engine.task(1.0, [1]))
    engine.slow(0, 1, 1.0)
    engine.slow(1, 0, 1.0)
    with pytest.raises(Deadlock) as caught:
        engine.run()
    assert caught.value.tasks == tasks


def test_losses_of_several_lanes_add_up_to_standing_still() -> None:
    engine = Engine(3)
    victim = engine.task(1.0, [0])
    engine.task(2.0, [1])
    engine.task(2.0, [2])
    engine.slow(0, 1, 0.75)
    engine.slow(0, 2, 0.75)
    engine.run()
    assert engine.end[victim] == 3.0


@given(WORKS, WORKS)
def test_a_chain_is_the_same_as_its_tasks(first: list[float], second: list[float]) -> None:
    chained, single = Engine(1), Engine(1)
    for works in (first, second):
        chained.chain(works, 0)
        for work in works:
            single.task(work, [0])
    assert chained.run() == single.run()
    assert (chained.start, chained.end) == (single.start, single.end)


def test_a_task_on_several_lanes_waits_for_the_last_of_them() -> None:
    engine = Engine(3)
    engine.task(1.0, [0])
    engine.task(5.0, [1])
    both = engine.task(1.0, [0, 1])
    after = engine.task(1.0, [0])
    engine.run()
    assert (engine.start[both], engine.start[after]) == (5.0, 6.0)


def test_tasks_that_wait_for_each_other_are_named() -> None:
    engine = Engine(2)
    engine.task(1.0, [0])
    a, b = engine.task(1.0, [0]), engine.task(1.0, [1])
    engine.wait(a, b)
    engine.wait(b, a)
    with pytest.raises(Deadlock, match="wait for each other: 1, 2") as caught:
        engine.run()
    assert caught.value.tasks == (a, b)


@given(TASKS, st.floats(0, 1))
def test_the_same_again_is_the_same_to_the_last_bit(tasks: Tasks, loss: float) -> None:
    one, two = (built(tasks, {(0, 1): loss, (2, 1): loss}) for _ in range(2))
    assert one.run() == two.run()
    assert (one.start, one.end) == (two.start, two.end)


@pytest.mark.parametrize(
    ("work", "lanes"), [(-1.0, [0]), (float("nan"), [0]), (float("inf"), [0]), (1.0, []), (1.0, [2]), (1.0, [-1])]
)
def test_what_is_no_task_is_refused(work: float, lanes: list[int]) -> None:
    with pytest.raises(ValueError, match="finite work"):
        Engine(2).task(work, lanes)


def test_what_is_no_loss_is_refused() -> None:
    with pytest.raises(ValueError, match="between 0 and 1"):
        Engine(2).slow(0, 1, 1.5)


@given(TASKS, st.lists(st.integers(0, 4).map(float), min_size=14, max_size=14), st.integers(1, 3))
def test_both_ways_to_play_agree_on_lags_and_rounds(tasks: Tasks, lags: list[float], rounds: int) -> None:
    """Lane 2 is slowed, by so little that it rounds away, which is enough to play event by event."""
    engines = [Engine(3), Engine(3)]
    for number, (work, lanes, back) in enumerate(tasks):
        for engine in engines:
            engine.task(work, lanes, [number - b for b in back if b <= number], lag=lags[number])
    engines[1].slow(2, 1, 5e-324)
    assert engines[0].run(rounds) == engines[1].run(rounds)
    for field in ("start", "end", "released"):
        assert getattr(engines[0], field) == getattr(engines[1], field)
        assert len(getattr(engines[0], field)) == rounds * len(tasks)


@given(TASKS)
def test_a_round_is_the_same_tasks_again(tasks: Tasks) -> None:
    twice = Engine(3)
    for first in (0, len(tasks)):
        for number, (work, lanes, back) in enumerate(tasks):
            twice.task(work, lanes, [first + number - b for b in back if b <= number])
    engine = built(tasks)
    assert engine.run(2) == twice.run()
    assert (engine.start, engine.end) == (twice.start, twice.end)
    loads = [sum(work for work, lanes, _ in tasks if lane in lanes) for lane in range(3)]
    assert engine.load(1) == pytest.approx(loads)


def test_a_lag_holds_those_who_wait_and_not_the_lane() -> None:
    engine = Engine(2)
    message = engine.task(1.0, [0], lag=5.0)
    next_message = engine.task(1.0, [0])
    reader = engine.task(1.0, [1], [message])
    engine.run()
    assert (engine.start[next_message], engine.start[reader]) == (1.0, 6.0)


@given(st.lists(st.tuples(st.integers(0, 8), st.integers(0, 4)), min_size=1, max_size=8))
def test_a_shared_lane_serves_in_the_order_of_readiness(tasks: list[tuple[int, int]]) -> None:
    engine = Engine(1 + len(tasks))
    made = [
        engine.task(float(work), [0], [engine.task(float(ready), [1 + number])])
        for number, (ready, work) in enumerate(tasks)
    ]
    engine.share(0)
    engine.run()
    free = 0.0
    for ready, number in sorted((ready, number) for number, (ready, _) in enumerate(tasks)):
        assert engine.start[made[number]] == max(free, ready)
        free = engine.end[made[number]] = max(free, ready) + tasks[number][1]


def test_what_cannot_be_is_refused() -> None:
    engine = Engine(2)
    engine.task(1.0, [0, 1])
    with pytest.raises(ValueError, match="cannot be shared"):
        engine.share(0)
    with pytest.raises(ValueError, match="a lag must be finite"):
        engine.task(1.0, [0], lag=-1.0)
    engine.task(1.0, [0], [7])
    with pytest.raises(ValueError, match="waits for one that is not"):
        engine.run()
    shared = Engine(2)
    shared.share(0)
    with pytest.raises(ValueError, match="cannot use a shared one"):
        shared.task(1.0, [0, 1])

"""Every named schedule, for any number of places, stages and micro-batches, is complete and can run."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from heterodyne.errors import PlanError
from heterodyne.plan import MicroBatches, Pipeline, Stage
from heterodyne.plan.order import orders_of
from heterodyne.plan.schedules import SCHEDULES, Schedule
from heterodyne.plan.schedules.check import order_faults
from heterodyne.plan.schedules.clock import play
from heterodyne.plan.schedules.times import StageTimes


@st.composite
def shapes(draw: st.DrawFn) -> tuple[Schedule, int, int, int]:
    schedule = draw(st.sampled_from(list(SCHEDULES.values())))
    chunks = schedule.chunks or draw(st.integers(1, 4))
    return schedule, draw(st.integers(1, 9)), chunks, draw(st.integers(0, 24))


@settings(max_examples=150, deadline=None)
@given(shapes())
def test_any_shape_keeps_all_rules(shape: tuple[Schedule, int, int, int]) -> None:
    schedule, places, chunks, micro_batches = shape
    orders = schedule.orders(places, chunks, micro_batches)
    on = schedule.stage_places(places, chunks)
    assert order_faults(orders, on, micro_batches) == ()
    assert len(orders) == places
    result = play(orders, [StageTimes(forward_s=1, input_s=1, weight_s=1)] * len(on))
    assert result.makespan_s >= 3 * chunks * micro_batches


@pytest.mark.parametrize("name", [name for name in SCHEDULES if name != "GPipe" and SCHEDULES[name].chunks != 2])
def test_one_stage_alone_runs_each_backward_at_once(name: str) -> None:
    (row,) = SCHEDULES[name].orders(1, 1, 3)
    assert " ".join(map(str, row)) == "0F0 0B0 0F1 0B1 0F2 0B2"


def test_gpipe_alone_still_runs_all_forwards_first() -> None:
    (row,) = SCHEDULES["GPipe"].orders(1, 1, 2)
    assert " ".join(map(str, row)) == "0F0 0F1 0B0 0B1"


def test_without_micro_batches_nobody_does_anything() -> None:
    for schedule in SCHEDULES.values():
        assert schedule.orders(3, schedule.chunks or 1, 0) == ((), (), ())


def test_places_of_stages() -> None:
    assert SCHEDULES["Interleaved1F1B"].stage_places(3, 2) == (0, 1, 2, 0, 1, 2)
    assert SCHEDULES["ZBVZeroBubble"].stage_places(3, 2) == (0, 1, 2, 2, 1, 0)


@pytest.mark.parametrize(
    ("name", "chunks", "words"),
    [
        ("ZBVZeroBubble", 1, "ZBVZeroBubble needs 2 stages on each place, in V order, not 1"),
        ("1F1B", 2, "1F1B needs 1 stage on each place, not 2"),
    ],
)
def test_a_number_of_stages_that_does_not_suit_is_refused(name: str, chunks: int, words: str) -> None:
    with pytest.raises(PlanError, match=words):
        SCHEDULES[name].orders(4, chunks, 8)


def test_nonsense_is_refused() -> None:
    with pytest.raises(PlanError, match="at least one place"):
        SCHEDULES["1F1B"].orders(0, 1, 8)


def test_schedules_cannot_be_changed() -> None:
    with pytest.raises(TypeError):
        SCHEDULES["mine"] = SCHEDULES["GPipe"]  # type: ignore[index]
    assert all(name == schedule.name for name, schedule in SCHEDULES.items())


def test_interleaving_lets_the_first_places_run_a_round_through_each_stage() -> None:
    first, last = SCHEDULES["Interleaved1F1B"].orders(2, 2, 4)
    assert " ".join(map(str, first)).startswith("0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1")
    assert " ".join(map(str, last)).startswith("1F0 1F1 3F0 3B0 3F1 3B1")


def test_the_last_stage_but_one_shifts_the_critical_path() -> None:
    orders = SCHEDULES["ShiftedCriticalPath"].orders(4, 1, 5)
    assert " ".join(map(str, orders[2])) == "2F0 2F1 2F2 2R0 2B0 2R1 2B1 2F3 2R2 2B2 2F4 2R3 2B3 2R4 2B4"
    assert all(action.kind != "R" for action in orders[3])


def pipeline(*devices: str, order: tuple[str, ...] = ()) -> Pipeline:
    stages = tuple(Stage(ops=(n, n + 1), devices=(device,), regions=()) for n, device in enumerate(devices))
    return Pipeline(micro_batches=MicroBatches((1, 1, 1)), stages=stages, order=order)


def test_a_pipeline_gets_the_orders_of_its_schedule_or_its_own() -> None:
    assert orders_of("1F1B", pipeline("a", "b")) == SCHEDULES["1F1B"].orders(2, 1, 3)
    assert orders_of("ZBVZeroBubble", pipeline("a", "b", "b", "a")) == SCHEDULES["ZBVZeroBubble"].orders(2, 2, 3)
    own = tuple(" ".join(map(str, row)) for row in SCHEDULES["ZBH1"].orders(2, 1, 3))
    assert orders_of("1F1B", pipeline("a", "b", order=own)) == SCHEDULES["ZBH1"].orders(2, 1, 3)


@pytest.mark.parametrize(
    ("schedule", "made", "words"),
    [
        ("Fast", pipeline("a", "b"), "'Fast' is not known; it can be GPipe, 1F1B"),
        ("1F1B", pipeline("a", "b", "a"), "3 stages cannot be spread so over 2 places: cut the model into 2 or 4"),
        ("Interleaved1F1B", pipeline("a", "b", "b", "a"), "on the places 0, 1, 0, 1, the pipeline on 0, 1, 1, 0"),
        ("1F1B", pipeline("a", order=("0F0 0Q0",)), "order: '0Q0' is not an action"),
    ],
)
def test_a_schedule_that_does_not_suit_the_pipeline_is_refused(schedule: str, made: Pipeline, words: str) -> None:
    with pytest.raises(PlanError, match=words):
        orders_of(schedule, made)

"""Each way to spoil an order is found, named and placed; and the picture shows it."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from heterodyne.plan.program import Action
from heterodyne.plan.schedules import SCHEDULES, Orders
from heterodyne.plan.schedules.check import order_faults
from heterodyne.plan.schedules.times import Read, StageBytes, StageTimes, chain
from heterodyne.report.faulty_orders import grid


def orders(*rows: str) -> Orders:
    return tuple(tuple(map(Action.parse, row.split())) for row in rows)


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        (("0F0 0B0", "1B0"), "place 1: 1F0 is missing"),
        (("0F0", "1F0 1B0"), "place 0: 0B0 is missing"),
        (("0F0 0F0 0B0", "1F0 1B0"), "place 0: 0F0 is there 2 times"),
        (("0F0 0B0 1F0", "1B0"), "place 0: 1F0 belongs on place 1"),
        (("0F0 0B0 0W0", "1F0 1B0"), "place 0: 0W0 is there besides 0B0"),
        (("0F0 0I0", "1F0 1B0"), "place 0: 0W0 is missing, though 0I0 is there"),
        (("0F0 0W0", "1F0 1B0"), "place 0: 0I0 is missing, though 0W0 is there"),
        (("0F0 0W0 0I0", "1F0 1B0"), "place 0: 0W0 runs before 0I0"),
        (("0F0 0B0 0R0", "1F0 1B0"), "place 0: 0B0 runs before 0R0"),
        (("0R0 0F0 0B0", "1F0 1B0"), "place 0: 0R0 runs before 0F0"),
        (("0F0 0B0", "1B0 1F0"), "place 1: 1B0 runs before 1F0"),
        (("0F0 0B0 0F1 0B1", "1F0 1B0"), "place 0: 0F1 is of a micro-batch that is not there"),
        (("0F0 0B0 2F0", "1F0 1B0"), "place 0: 2F0 is of stage 2, but there are 2 stages"),
        (("0F0 0SEND_F0 0B0", "1F0 1B0"), "place 0: 0SEND_F0 does not compute"),
        (("0F0 0B0", "1F0 1R0 1B0"), "place 1: 1R0 recomputes, but stage 1 keeps everything"),
        (("0F0 0B0",), "there are 1 orders for 2 places"),
    ],
)
def test_a_spoiled_order_is_named(rows: tuple[str, ...], words: str) -> None:
    messages = [fault.message for fault in order_faults(orders(*rows), (0, 1), 1, recomputes={0})]
    assert any(message.startswith(words) for message in messages), messages


def test_a_deadlock_is_told_as_the_circle_that_it_is() -> None:
    crossed = orders("0F0 0B0 0F1 0B1", "1F1 1F0 1B0 1B1")
    (fault,) = order_faults(crossed, (0, 1), 2)
    assert "0B0 (place 0) waits for 1B0 (place 1), which stands behind 1F1" in fault.message
    assert "1F1 (place 1) waits for 0F1 (place 0), which stands behind 0B0" in fault.message
    assert crossed[fault.place][fault.position or 0] in (Action(0, "B", 0), Action(1, "F", 1))


def test_who_does_not_stand_in_the_circle_is_not_blamed() -> None:
    crossed = orders("0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1", "2F1 2F0 2B0 2B1")
    (fault,) = order_faults(crossed, (0, 1, 2), 2)
    assert "place 1" in fault.message
    assert "place 2" in fault.message
    assert "place 0" not in fault.message


def test_a_skip_may_close_the_circle() -> None:
    rows = orders("0F0 2F0 2B0 0B0 0F1 2F1 2B1 0B1", "1F0 1F1 1B0 1B1")
    places = (0, 1, 0)
    assert order_faults(rows, places, 2)
    without = [Read(source=0, reader=1), Read(source=0, reader=2)]
    assert order_faults(rows, places, 2, reads=without) != ()
    assert order_faults(rows, places, 2, reads=[Read(source=0, reader=2)]) == ()
    mask = [Read(source=0, reader=2), Read(source=0, reader=1, backward_s=None)]
    assert order_faults(rows, places, 2, reads=mask) == ()


def test_memory_over_the_limit_is_told_with_where_and_by_how_much() -> None:
    rows = SCHEDULES["GPipe"].orders(2, 1, 4)
    held = [StageBytes(activation=10)] * 2
    assert order_faults(rows, (0, 1), 4, held_bytes=held, free_bytes=[40, 40]) == ()
    (fault,) = order_faults(rows, (0, 1), 4, held_bytes=held, free_bytes=[40, 25])
    assert fault.message.startswith("place 1 holds 40 bytes of activations at 1F3, 15 more than the 25 that are free")
    assert (fault.place, fault.position) == (1, 2)


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_work_that_is_taken_out_or_doubled_is_always_found(data: st.DataObject) -> None:
    schedule = data.draw(st.sampled_from(list(SCHEDULES.values())))
    chunks = schedule.chunks or data.draw(st.integers(1, 2))
    places = data.draw(st.integers(2, 4))
    rows = [list(row) for row in schedule.orders(places, chunks, 5)]
    on = schedule.stage_places(places, chunks)
    row = rows[data.draw(st.integers(0, places - 1))]
    position = data.draw(st.integers(0, len(row) - 1))
    match data.draw(st.sampled_from(["twice", "away", "elsewhere"])):
        case "twice":
            row.insert(data.draw(st.integers(0, len(row))), row[position])
        case "away" if row[position].kind != "R":
            row.pop(position)
        case _:
            rows[(rows.index(row) + 1) % places].append(row.pop(position))
    assert order_faults(tuple(map(tuple, rows)), on, 5)


def test_the_grid_shows_waits_and_long_actions() -> None:
    assert grid(SCHEDULES["1F1B"].orders(2, 1, 2)).splitlines() == [
        "place 0 | 0F0 0F1  .   .  0B0  =   .  0B1  =",
        "place 1 |  .  1F0 1B0  =  1F1 1B1  =   .   .",
    ]


def test_the_grid_follows_given_times() -> None:
    times = [StageTimes(forward_s=2, input_s=1, weight_s=1), StageTimes(forward_s=1, input_s=2, weight_s=2)]
    assert grid(orders("0F0 0I0 0W0", "1F0 1B0"), times, reads=chain(2, 1.0)).splitlines() == [
        "place 0 | 0F0  =   .   .   .   .   .   .   .  0I0 0W0",
        "place 1 |  .   .   .  1F0 1B0  =   =   =   .   .   .",
    ]
    assert len(grid(orders("0F0 0B0", "1F0 1B0"), times, most_columns=3).splitlines()[0]) < 40


def test_the_grid_marks_the_fault() -> None:
    crossed = orders("0F0 0B0 0F1 0B1", "1F1 1F0 1B0 1B1")
    faults = order_faults(crossed, (0, 1), 2)
    first, second, told = grid(crossed, faults=faults).splitlines()
    assert ">0B0<" in first or ">1F1<" in second
    assert told.startswith("fault: places wait for each other")


def test_nothing_to_draw_is_drawn() -> None:
    assert grid(((), ())).splitlines() == ["place 0 | .", "place 1 | ."]

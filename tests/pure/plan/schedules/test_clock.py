"""What the clock knows beyond uniform chains: transfers, shared places, skips, and memory."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from heterodyne.errors import PlanError
from heterodyne.plan.program import Action
from heterodyne.plan.schedules import SCHEDULES, Orders
from heterodyne.plan.schedules.clock import Clock, place_of_stage, play
from heterodyne.plan.schedules.held import held_along
from heterodyne.plan.schedules.times import Read, StageBytes, StageTimes, chain

UNIT = StageTimes(forward_s=1, input_s=1, weight_s=1)


def orders(*rows: str) -> Orders:
    return tuple(tuple(map(Action.parse, row.split())) for row in rows)


def test_each_transfer_takes_its_time_both_ways() -> None:
    result = play(orders("0F0 0B0", "1F0 1B0"), [UNIT, UNIT], reads=chain(2, 0.5))
    assert result.starts == ((0.0, 5.0), (1.5, 2.5))
    assert result.makespan_s == 7.0
    assert result.bubble == (pytest.approx(4 / 7), pytest.approx(4 / 7))


def test_the_gradient_leaves_after_i_not_after_w() -> None:
    whole = play(orders("0F0 0B0", "1F0 1B0"), [UNIT, UNIT])
    halves = play(orders("0F0 0B0", "1F0 1I0 1W0"), [UNIT, UNIT])
    assert (whole.starts[0][1], halves.starts[0][1]) == (4.0, 3.0)


def test_stages_of_one_place_send_nothing() -> None:
    result = play(orders("0F0 1F0 1B0 0B0"), [UNIT, UNIT], reads=chain(2, 100.0))
    assert result.makespan_s == 6.0


def test_a_skip_connection_is_waited_for_and_its_gradient_too() -> None:
    skip = Read(source=0, reader=2, forward_s=10.0, backward_s=20.0)
    rows = orders("0F0 0B0", "1F0 1B0", "2F0 2B0")
    result = play(rows, [UNIT] * 3, reads=[*chain(3), skip])
    assert result.starts[2][0] == 11.0
    assert result.starts[0][1] == 14.0 + 20.0
    mask = Read(source=0, reader=2, forward_s=10.0, backward_s=None)
    assert play(rows, [UNIT] * 3, reads=[*chain(3), mask]).starts[0][1] == 11.0 + 1 + 2 + 2


def test_recompute_stands_in_the_backward_unless_the_order_says_when() -> None:
    slow = StageTimes(forward_s=1, input_s=1, weight_s=1, recompute_s=1)
    assert play(orders("0F0 0B0", "1F0 1B0"), [slow, UNIT]).makespan_s == 2 + 2 + 3
    assert play(orders("0F0 0R0 0B0", "1F0 1B0"), [slow, UNIT]).makespan_s == 2 + 2 + 2
    assert play(orders("0F0 0I0 0W0", "1F0 1B0"), [slow, UNIT]).makespan_s == 2 + 2 + 3


def test_held_bytes_follow_each_action() -> None:
    keeps = [StageBytes(activation=10, input_frees=4, kept=3)]
    (row,) = orders("0F0 0F1 0R0 0I0 0W0 0B1")
    assert held_along(row, keeps) == [3, 6, 13, 13, 9, 10]
    assert play((row,), [UNIT], held=keeps).peak_bytes == (13,)


def test_orders_that_stop_are_told_where() -> None:
    with pytest.raises(PlanError, match=r"stop at 0B0, 1F1"):
        play(orders("0F0 0B0 0F1 0B1", "1F1 1F0 1B0 1B1"), [UNIT, UNIT])


def test_an_action_of_no_stage_is_refused() -> None:
    with pytest.raises(PlanError, match="3F0 is of stage 3, but there are 2 stages"):
        play(orders("0F0 0B0", "3F0"), [UNIT, UNIT])


def test_nothing_to_do_takes_no_time() -> None:
    result = play(((), ()), [UNIT, UNIT])
    assert (result.makespan_s, result.bubble) == (0.0, (0.0, 0.0))


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from([s for s in SCHEDULES.values() if s.chunks != 2]),
    st.integers(1, 5),
    st.integers(1, 8),
    st.lists(st.tuples(*[st.integers(0, 9)] * 4), min_size=5, max_size=5),
    st.integers(0, 5),
)
def test_every_action_starts_as_soon_as_it_can_and_no_sooner(
    schedule: object, places: int, micro_batches: int, seconds: list[tuple[int, int, int, int]], send: int
) -> None:
    rows = schedule.orders(places, 1, micro_batches)  # type: ignore[attr-defined]
    times = [StageTimes(forward_s=f, input_s=i, weight_s=w, recompute_s=r) for f, i, w, r in seconds[:places]]
    result = play(rows, times, reads=chain(places, send))
    end = {a: e for row, ends in zip(rows, result.ends, strict=True) for a, e in zip(row, ends, strict=True)}

    def of_gradient(stage: int, index: int | None) -> float:
        return end.get(Action(stage, "B", index), end.get(Action(stage, "I", index), 0.0))

    for row, starts in zip(rows, result.starts, strict=True):
        before = 0.0
        for action, start in zip(row, starts, strict=True):
            came = 0.0
            if action.kind == "F" and action.stage > 0:
                came = end[Action(action.stage - 1, "F", action.index)] + send
            if action.kind in ("B", "I") and action.stage < places - 1:
                came = of_gradient(action.stage + 1, action.index) + send
            assert start == max(before, came)
            before = end[action]


def test_codes_can_be_read_back() -> None:
    for name, chunks in (("ShiftedCriticalPath", 1), ("ZBVZeroBubble", 2)):
        rows = SCHEDULES[name].orders(3, chunks, 5)
        clock = Clock([UNIT] * (3 * chunks), place_of_stage(rows, 3 * chunks), 5)
        assert clock.decode(clock.encode(rows)) == rows

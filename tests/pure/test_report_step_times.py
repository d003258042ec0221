"""Where the time of a step goes, on timelines small enough to count by hand."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from heterodyne.report.step_times import EXPOSED, IDLE, WAIT, by_rank, in_order, median_step, step_spans
from heterodyne.timeline import Event, Lane, Timeline


def event(rank: int, lane: Lane, kind: str, start_s: float, end_s: float, step: int = 0) -> Event:
    return Event(rank=rank, lane=lane, kind=kind, name=f"0{kind}", step=step, start_s=start_s, end_s=end_s)


def test_overlapped_communication_is_told_apart_from_what_shows() -> None:
    timeline = Timeline.of(
        "measured",
        ["a", "b"],
        [
            event(0, "compute", "F", 1, 3),
            event(0, "compute", "B", 3, 7),
            event(0, "comm", "REDUCE_GRAD", 5, 9),
            event(0, "compute", "STEP", 9, 10),
            event(1, "compute", "F", 1, 2),
            event(1, "comm", "REDUCE_GRAD", 8, 9),
            event(1, "compute", "STEP", 9, 11),
        ],
    )
    fast, slow = by_rank(timeline)
    assert fast.kinds == {"F": 2, "B": 4, "REDUCE_GRAD": 4, "STEP": 1}
    assert (fast.span_s, fast.seconds(EXPOSED), fast.seconds(IDLE), fast.seconds(WAIT)) == (10, 2, 1, 3)
    assert (slow.seconds(EXPOSED), slow.seconds(IDLE), slow.seconds("B")) == (1, 6, 0)


def test_reductions_in_flight_together_are_counted_once() -> None:
    timeline = Timeline.of(
        "measured", ["a"], [event(0, "comm", "REDUCE_GRAD", 0, 2), event(0, "comm", "REDUCE_GRAD", 1, 3)]
    )
    assert by_rank(timeline)[0].kinds == {"REDUCE_GRAD": 3}


def test_a_message_is_no_work_of_the_rank() -> None:
    timeline = Timeline.of(
        "measured",
        ["a"],
        [
            event(0, "compute", "F", 0, 1),
            event(0, "comm", "SEND_F", 1, 2),
            event(0, "comm", "RECV_B", 1, 5),
            event(0, "compute", "B", 5, 6),
            event(0, "comm", "REDUCE_GRAD", 6, 7),
        ],
    )
    (times,) = by_rank(timeline)
    assert (times.seconds(EXPOSED), times.seconds(IDLE), times.seconds(WAIT)) == (1, 4, 5)
    assert times.kinds["RECV_B"] == 4


def test_an_event_that_says_wait_is_no_work() -> None:
    timeline = Timeline.of("measured", ["a"], [event(0, "compute", "F", 0, 1), event(0, "compute", "WAIT", 1, 4)])
    (times,) = by_rank(timeline)
    assert times.kinds == {"F": 1}
    assert times.wait_s == 3


def test_a_rank_without_a_share_waits_all_step() -> None:
    timeline = Timeline.of("simulated", ["a", "b"], [event(0, "compute", "F", 0, 2)])
    assert by_rank(timeline)[1].seconds(WAIT) == 2


def test_one_disturbed_step_does_not_decide() -> None:
    lengths = [1.0, 1.1, 9.0]
    timeline = Timeline.of(
        "measured", ["a"], [event(0, "compute", "F", 10 * i, 10 * i + s, step=i) for i, s in enumerate(lengths)]
    )
    assert by_rank(timeline)[0].kinds["F"] == pytest.approx(1.1)
    assert median_step(timeline) == 1
    assert step_spans(timeline) == pytest.approx({0: 1.0, 1: 1.1, 2: 9.0})


def test_no_events_no_times() -> None:
    nothing = Timeline.of("measured", ["a"], [])
    assert by_rank(nothing) == ()
    assert median_step(nothing) is None


def test_kinds_come_in_the_order_of_a_step() -> None:
    assert in_order({"wait", "STEP", "NEW", "B", "REDUCE_GRAD", "F"}) == (
        "F",
        "B",
        "REDUCE_GRAD",
        "STEP",
        "NEW",
        "wait",
    )


spans = st.tuples(st.sampled_from(["compute", "comm"]), st.floats(0, 10), st.floats(0, 5))


@given(st.lists(spans, min_size=1, max_size=12))
def test_the_parts_of_one_step_add_up_to_it(drawn: list[tuple[Lane, float, float]]) -> None:
    timeline = Timeline.of(
        "measured", ["a"], [event(0, lane, "F", start, start + length) for lane, start, length in drawn]
    )
    (times,) = by_rank(timeline)
    assert timeline.busy_s(0) + times.exposed_s + times.idle_s == pytest.approx(times.span_s, abs=1e-9)

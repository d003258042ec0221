"""Where activations leave for the host and come back, between the passes."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from heterodyne.plan.lower import with_offload
from heterodyne.plan.program import Action
from heterodyne.plan.schedules import SCHEDULES


def row(text: str) -> tuple[Action, ...]:
    return tuple(map(Action.parse, text.split()))


def test_copies_have_one_pass_to_leave_in_and_come_back_as_far_ahead_as_the_plan_says() -> None:
    order = row("0F0 0F1 0F2 0B0 0B1 0B2")
    assert tuple(with_offload(order, {})) == order
    told = "0F0 0F1 0OFFLOAD0 0F2 0OFFLOAD1 0B0 0B1 0B2"
    # What is still there when its own backward begins, 2 here, does not leave at all.
    told = told.replace("0B0 0B1", "0B0 0OFFLOAD2 0B1")
    assert tuple(with_offload(order, {0: None})) == row(told)
    assert tuple(with_offload(order, {0: 0})) == row(
        "0F0 0F1 0OFFLOAD0 0F2 0OFFLOAD1 0RELOAD0 0B0 0OFFLOAD2 0RELOAD1 0B1 0RELOAD2 0B2"
    )
    assert tuple(with_offload(order, {0: 1})) == row(
        "0F0 0F1 0OFFLOAD0 0RELOAD0 0F2 0OFFLOAD1 0RELOAD1 0B0 0OFFLOAD2 0RELOAD2 0B1 0B2"
    )
    assert tuple(with_offload(row("0F0 0B0 0F1 0B1"), {0: 1})) == row("0F0 0B0 0F1 0B1")


@given(st.sampled_from(sorted(SCHEDULES)), st.integers(1, 4), st.integers(1, 6), st.none() | st.integers(0, 9))
def test_each_stands_once_between_forward_and_backward(name: str, places: int, count: int, ahead: int | None) -> None:
    schedule = SCHEDULES[name]
    chunks = schedule.chunks or 1
    places = max(2, places) if chunks > 1 else places
    for order in schedule.orders(places, chunks, count):
        hosted = dict.fromkeys({action.stage for action in order}, ahead)
        made = list(with_offload(order, hosted))
        assert tuple(action for action in made if action.kind not in ("OFFLOAD", "RELOAD")) == tuple(order)
        assert len(made) == len(set(made))
        place = {action: number for number, action in enumerate(made)}
        for action in made:
            if action.kind == "OFFLOAD":
                stage, index = action.stage, action.index
                backward = min(place.get(Action(stage, kind, index), len(made)) for kind in ("B", "I"))
                assert place[Action(stage, "F", index)] + 1 < place[action] < backward
                back = Action(stage, "RELOAD", index)
                assert (back in place) == (ahead is not None)
                assert back not in place or place[action] < place[back] < backward

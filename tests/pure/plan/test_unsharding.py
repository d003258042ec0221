"""Where parameters are gathered and let go of, around the passes of stages."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from heterodyne.plan.program import Action
from heterodyne.plan.schedules import SCHEDULES
from heterodyne.plan.unsharding import with_unsharding


def most_at_once(actions: tuple[Action, ...]) -> int:
    """Stages whose parameters are there."""
    gathered, most = 0, 0
    for action in actions:
        gathered += (action.kind == "UNSHARD") - (action.kind == "RESHARD")
        most = max(most, gathered)
    return most


@given(st.integers(1, 12), st.integers(1, 6))
def test_stages_in_turn_are_gathered_twice_each_but_the_last_whatever_the_micro_batches(
    stages: int, micro_batches: int
) -> None:
    """The last stage turns round at once. Two stages are there at a time: one that runs, and the next one."""
    (order,) = SCHEDULES["GPipe"].orders(1, stages, micro_batches)
    actions = with_unsharding(order, {bucket: (stages - 1 - bucket,) for bucket in range(stages)})
    assert sum(action.kind == "UNSHARD" for action in actions) == 2 * stages - 1
    assert most_at_once(actions) == min(2, stages)
    assert [action for action in actions if action.kind in ("F", "B")] == list(order)
    place = {action: number for number, action in enumerate(actions)}
    for bucket in range(stages):
        last = max(place[Action(stages - 1 - bucket, "B", index)] for index in range(micro_batches))
        assert last < place[Action(0, "SCATTER", bucket)] <= last + 2  # right behind it


@pytest.mark.parametrize("schedule", ["1F1B", "ZBH1"])
def test_a_stage_whose_passes_alternate_stays_gathered(schedule: str) -> None:
    for place, order in enumerate(SCHEDULES[schedule].orders(3, 1, 6)):
        actions = with_unsharding(order, {0: (place,)})
        kinds = [action.kind for action in actions]
        assert (kinds.count("UNSHARD"), kinds[0], kinds[-2:]) == (1, "UNSHARD", ["RESHARD", "SCATTER"])


def test_a_bucket_that_several_stages_read_is_reduced_behind_the_last_of_them_and_in_order() -> None:
    (order,) = SCHEDULES["GPipe"].orders(1, 3, 2)
    actions = with_unsharding(order, {0: (2,), 1: (0, 2), 2: (1,)})
    found = [action.index for action in actions if action.kind == "SCATTER"]
    assert found == [0, 1, 2]
    place = {action: number for number, action in enumerate(actions)}
    assert place[Action(0, "B", 1)] < place[Action(0, "SCATTER", 1)] < place[Action(0, "SCATTER", 2)]


def test_without_a_micro_batch_everything_is_reduced_all_the_same() -> None:
    assert with_unsharding((), {0: (0,), 1: (1,)}) == (Action(0, "SCATTER", 0), Action(0, "SCATTER", 1))

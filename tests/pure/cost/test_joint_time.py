"""Devices that wait for each other: between two exchanges the slowest counts."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from heterodyne.cost.joint_time import Step, joint_s

SECONDS = st.integers(0, 40).map(lambda n: n / 8)  # exact in binary, so that sums are exact too


@st.composite
def courses(draw: st.DrawFn) -> list[Step]:
    members = draw(st.integers(1, 4))
    computing = st.tuples(*[SECONDS] * members)
    return draw(st.lists(st.one_of(computing, SECONDS), max_size=8))


def computed(steps: list[Step]) -> list[tuple[float, ...]]:
    return [step for step in steps if isinstance(step, tuple)]


def exchanged(steps: list[Step]) -> float:
    return sum(step for step in steps if not isinstance(step, tuple))


@given(courses())
def test_it_takes_no_less_than_any_member_does_and_no_more_than_the_slowest_of_each_step(steps: list[Step]) -> None:
    members = [sum(own) for own in zip(*computed(steps), strict=True)]
    assert joint_s(steps) >= max(members, default=0.0) + exchanged(steps)
    assert joint_s(steps) <= sum(map(max, computed(steps))) + exchanged(steps)


@given(courses())
def test_one_way_takes_as_long_as_the_other_way_round(steps: list[Step]) -> None:
    assert joint_s(reversed(steps)) == joint_s(steps)


@given(courses())
def test_members_that_are_alike_wait_for_nobody(steps: list[Step]) -> None:
    alike: list[Step] = [(step[0],) * 3 if isinstance(step, tuple) else step for step in steps]
    assert joint_s(alike) == sum(step[0] for step in computed(steps)) + exchanged(steps)


def test_who_is_ahead_waits_at_each_exchange() -> None:
    assert joint_s([(1.0, 3.0), (3.0, 1.0)]) == 4  # they need nothing of each other in between
    assert joint_s([(1.0, 3.0), 0.0, (3.0, 1.0)]) == 6
    assert joint_s([]) == pytest.approx(0)

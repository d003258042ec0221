"""Two halves in turns: what of their exchanges is hidden, by theory."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from heterodyne.cost.joint_time import joint_s
from heterodyne.cost.overlap import Crossing, OverlapStep, overlapped_s

SECONDS = st.integers(0, 40).map(lambda n: n / 8)  # exact in binary, so that sums are exact too
CROSSINGS = st.builds(Crossing, own_s=SECONDS, latency_s=SECONDS, transfer_s=SECONDS)
MEMBERS = 3


@st.composite
def courses(draw: st.DrawFn) -> list[OverlapStep]:
    return draw(st.lists(st.one_of(st.tuples(*[SECONDS] * MEMBERS), SECONDS, CROSSINGS), max_size=8))


def computed(course: list[OverlapStep]) -> list[tuple[float, ...]]:
    return [step for step in course if isinstance(step, tuple)]


def one_after_the_other(course: list[OverlapStep]) -> float:
    return joint_s(step.waited_s if isinstance(step, Crossing) else step for step in course)


@given(courses())
def test_it_takes_no_longer_than_one_half_after_the_other(course: list[OverlapStep]) -> None:
    assert overlapped_s([course, course], MEMBERS) <= 2 * one_after_the_other(course)


@given(courses())
def test_no_member_and_no_wire_does_two_things_at_once(course: list[OverlapStep]) -> None:
    took = overlapped_s([course, course], MEMBERS)
    crossings = [step for step in course if isinstance(step, Crossing)]
    waits = sum(step for step in course if isinstance(step, float))
    for own in zip(*computed(course), strict=True):
        assert took >= 2 * (sum(own) + sum(crossing.own_s for crossing in crossings) + waits)
    assert took >= 2 * (sum(crossing.transfer_s for crossing in crossings) + waits)


@given(st.lists(st.tuples(*[SECONDS] * MEMBERS), min_size=1, max_size=5), st.data())
def test_what_is_shorter_than_the_computing_beside_it_is_hidden(
    steps: list[tuple[float, ...]], data: st.DataObject
) -> None:
    """Where the members are alike, all but what stands at the very end."""
    alike = [(step[0],) * MEMBERS for step in steps]
    course: list[OverlapStep] = []
    for step, behind in zip(alike, [*alike[1:], (0.0,)], strict=True):
        way = data.draw(st.integers(0, int(8 * min(step[0], behind[0])))) / 8
        course += [step, Crossing(own_s=0.0, latency_s=0.0, transfer_s=way)]
    assert overlapped_s([course, course], MEMBERS) == pytest.approx(2 * sum(step[0] for step in alike))


def test_the_wires_carry_one_exchange_at_a_time() -> None:
    course: list[OverlapStep] = [(1.0, 1.0), Crossing(own_s=0.0, latency_s=0.0, transfer_s=10.0), (1.0, 1.0)]
    assert overlapped_s([course, course], 2) == 1 + 10 + 10 + 1


def test_the_latency_of_one_exchange_does_not_hold_up_another() -> None:
    """Of 4 s each, both halves' exchanges are under way at once; transfers of 4 s follow each other."""
    for latency, transfer, waited in ((4.0, 0.0, 4), (0.0, 4.0, 8)):
        course: list[OverlapStep] = [Crossing(own_s=0.0, latency_s=latency, transfer_s=transfer), (1.0, 1.0)]
        assert overlapped_s([course, course], 2) == waited + (2 if not transfer else 1)

"""1F1B without a flush: what theory says of its order and of its period."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from heterodyne.cost.step import RankCosts, StepCosts
from heterodyne.plan import Action, Program
from heterodyne.plan.schedules.asynchronous import ahead, depth_of, drained, predicted_versions, steady, unrolled
from heterodyne.sim import simulate
from pure.sim.pipelines import links, stage_costs, with_messages

STEP = Action(0, "STEP")


def one_step(program: Program) -> Program:
    return Program(ranks=tuple((*actions, STEP) for actions in program.ranks))


def pipeline(
    seconds: list[tuple[float, float]], count: int, times: int = 1, latency_s: float = 0.0
) -> tuple[Program, StepCosts]:
    """Places with these seconds of a forward and a backward, in flight ``times`` what 1F1B has."""
    places = len(seconds)
    orders = tuple(ahead(place, times * (places - 1 - place), count) for place in range(places))
    program = one_step(with_messages(orders, range(places)))
    ranks = tuple(
        RankCosts(stages={place: stage_costs(count, f, b / 2, b / 2, kept=1)}, step_s=0.25)
        for place, (f, b) in enumerate(seconds)
    )
    return program, StepCosts(ranks=ranks, routes=links(range(places), count, latency_s=latency_s))


SECONDS = st.tuples(st.integers(1, 16), st.integers(1, 16)).map(lambda each: (each[0] / 8, each[1] / 8))


@given(st.integers(0, 5), st.integers(1, 9), st.integers(1, 4))
def test_every_micro_batch_runs_once_and_an_update_follows_the_last_of_its_batch(
    depth: int, count: int, batches: int
) -> None:
    order = (*ahead(0, depth, count), STEP)
    going = steady(order)
    assert depth_of(order) == min(depth, count - 1)
    played = [
        *unrolled(going, batches),
        *(replace(a, index=a.index and a.index + batches * count) for a in drained(going)),
    ]
    for kind in ("F", "B"):
        assert [a.index for a in played if a.kind == kind] == list(range(batches * count))
    assert sum(a == STEP for a in played) == batches
    for at, action in enumerate(played):
        if action == STEP:
            done = [a.index for a in played[:at] if a.kind == "B"]
            assert len(done) % count == 0
            assert played[at - 1].kind == "B"


@given(st.lists(SECONDS, min_size=2, max_size=5), st.integers(6, 9))
@settings(deadline=None)
def test_the_slowest_place_never_waits_where_messages_take_no_time(
    seconds: list[tuple[float, float]], count: int
) -> None:
    """With twice as much in flight as 1F1B has; its neighbours need not be as fast."""
    program, costs = pipeline(seconds, 2 * count, times=2)
    going = Program(ranks=tuple(map(steady, program.ranks)))
    played = simulate(program, costs, steady=going)
    assert played.step_s == pytest.approx(max(2 * count * (f + b) for f, b in seconds) + 0.25)
    assert min(played.wait_s) == pytest.approx(0.0, abs=1e-9)
    assert played.step_s <= simulate(program, costs).step_s + 1e-9
    of_one = [span for span in played.spans if span.step == len(seconds) and span.lane == "compute"]
    for rank, actions in enumerate(going.ranks):
        own = [str(span.action) for span in sorted(of_one, key=lambda span: span.start_s) if span.rank == rank]
        assert own == [
            str(action if action.index is None else replace(action, index=action.index % (2 * count)))
            for action in actions
            if action.kind in ("F", "B", "STEP")
        ]


def test_alike_places_hide_messages_behind_what_is_in_flight() -> None:
    """A turn is a forward and a backward of two neighbours and two messages: 1F1B runs two micro-batches in it, twice the depth three."""
    for times, period_s in ((1, 8 * (2 * 3.0 + 2 * 1.5) / 2), (2, 8 * 3.0 + 0.25)):
        program, costs = pipeline([(1.0, 2.0), (1.0, 2.0)], 8, times, latency_s=1.5)
        played = simulate(program, costs, steady=Program(ranks=tuple(map(steady, program.ranks))))
        assert played.step_s == pytest.approx(period_s, rel=0.02)


@given(st.integers(0, 6), st.integers(1, 12))
def test_predicted_versions_are_those_that_are_read_at_a_time(depth: int, count: int) -> None:
    depth = min(depth, count - 1)
    reading: set[int] = set()
    most = 0
    for action in unrolled(steady((*ahead(0, depth, count), STEP)), 6):
        if action.index is not None and action.index >= count and action.index % count < depth:
            (reading.add if action.kind == "F" else reading.discard)(action.index)
            most = max(most, len({index // count for index in reading}))
    assert predicted_versions(depth, count) == most

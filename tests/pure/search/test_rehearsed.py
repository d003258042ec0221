"""What was run counts for more than what was predicted."""

from __future__ import annotations

import random

import pytest

from heterodyne.job import Strategy
from heterodyne.search.contenders import LEAST_TURNS, NEAR, near_the_chosen, nothing_new, still_in, told_apart
from heterodyne.search.explain import alternatives, paragraph
from heterodyne.search.planned import Planned, Rehearsed, identity, serves
from heterodyne.search.planner import plan
from pure.build import cluster, graph, linear, profile

MODEL = graph(layers=6, width=16)


def searched(strategy: Strategy = "auto", **rehearsed: float) -> Planned:
    machines = cluster(3)
    known = profile(MODEL, machines, [linear(0.01 / s) for s in (0.7, 0.5, 0.3)], optimizer_s=0.01)
    seen = {name: Rehearsed(seconds=s, as_fast=s == min(rehearsed.values())) for name, s in rehearsed.items()}
    return plan(MODEL, machines, known, global_batch_size=24, strategy=strategy, rehearsed=seen, near=NEAR)


def test_of_what_was_rehearsed_the_fastest_is_chosen_whatever_was_predicted() -> None:
    near = near_the_chosen(searched(), 6)
    plans = [identity(c.plan) for c in near if c.plan is not None]
    assert len(plans) > 2
    for seed in range(2):
        chance = random.Random(seed)
        seconds = {name: 1 + number * 0.05 for number, name in enumerate(chance.sample(plans, len(plans)))}
        found = searched(**seconds)
        assert seconds[identity(found.plan)] == min(seconds.values())
        assert found.chosen.rehearsed_s == min(seconds.values())


def test_a_difference_smaller_than_its_own_spread_is_left_to_the_prediction() -> None:
    before = searched()
    plans = [identity(c.plan) for c in near_the_chosen(before, 2) if c.plan is not None]
    chance = random.Random(3)
    steps = [1.0 + 0.1 * chance.random() for _ in range(10)]
    for gain, spread, kept in ((0.01, 0.05, True), (0.05, 0.01, False)):
        other = [own * (1 - gain + spread * (-1) ** number) for number, own in enumerate(steps)]
        seen = told_apart([steps, other])
        assert seen[1].seconds < seen[0].seconds
        machines = cluster(3)
        known = profile(MODEL, machines, [linear(0.01 / s) for s in (0.7, 0.5, 0.3)], optimizer_s=0.01)
        after = plan(
            MODEL, machines, known, global_batch_size=24, rehearsed=dict(zip(plans, seen, strict=True)), near=NEAR
        )
        assert (identity(after.plan) == plans[0]) is kept


def test_a_plan_that_came_to_fit_after_a_rehearsal_is_rehearsed_too() -> None:
    before = searched()
    assert not nothing_new(before), "nothing was run yet"
    best, *others = [identity(c.plan) for c in near_the_chosen(before, 6) if c.plan is not None]
    assert nothing_new(searched(**dict.fromkeys([best, *others], 1.0)))
    assert not nothing_new(searched(**dict.fromkeys(others, 1.0))), "the best one by prediction was not run"


def test_what_slows_the_machine_down_for_all_plans_does_not_hide_which_is_the_faster_one() -> None:
    slower_and_slower = [1.0 + number for number in range(8)]
    faster = [own * 0.98 for own in slower_and_slower]
    assert [seen.as_fast for seen in told_apart([slower_and_slower, faster])] == [False, True]
    assert still_in([slower_and_slower, faster]) == [1]


def test_only_plans_that_serve_and_come_near_are_rehearsed_the_chosen_one_first() -> None:
    for strategy in ("auto", "data", "pipeline"):
        found = searched(strategy)
        near = near_the_chosen(found, 4)
        assert near[0] is found.chosen
        assert 1 < len(near) <= 4
        assert len({identity(c.plan) for c in near if c.plan is not None}) == len(near)
        assert all(serves(c.kind, strategy) for c in near)
        assert all(c.weighed_s <= NEAR * found.chosen.weighed_s for c in near)


@pytest.mark.parametrize("strategy", ["equal", "fastest"])
def test_who_asked_for_one_way_gets_it_without_a_rehearsal(strategy: Strategy) -> None:
    assert near_the_chosen(searched(strategy), 6) == ()


def test_a_rehearsal_is_told_with_the_error_of_the_prediction() -> None:
    near = near_the_chosen(searched(), 2)
    seconds = {identity(c.plan): 1.25 * (c.step_s or 0.0) for c in near if c.plan is not None}
    found = searched(**seconds)
    assert "off by -20.0%" in paragraph(found)
    assert "fastest of the 2 closest contenders" in found.plan.reason
    assert sum("in rehearsal" in row.note for row in alternatives(found)) == 2


def test_a_plan_is_run_until_it_is_clear_that_it_is_slower() -> None:
    chance = random.Random(4)
    steady = [1.0 + 0.1 * chance.random() for _ in range(12)]
    close = [own + (-1) ** number * 0.01 for number, own in enumerate(steady)]
    slow = [own + 0.2 for own in steady]
    few = LEAST_TURNS - 1
    assert still_in([[], [], []]) == [0, 1, 2]
    assert still_in([steady[:few], close[:few], slow[:few]]) == [0, 1, 2], "so few may be chance"
    assert still_in([slow[:LEAST_TURNS], steady[:LEAST_TURNS]]) == [1]
    assert still_in([steady, close, slow]) == [0, 1]
    assert still_in([steady, slow[:5]]) == [0], "who is out stays out"
    seen = told_apart([steady, close, slow[:5]])
    assert [own.as_fast for own in seen] == [True, True, False]

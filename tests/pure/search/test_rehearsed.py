"""What was run counts for more than what was predicted."""

from __future__ import annotations

import random

import pytest

from heterodyne.search import Planned, plan
from heterodyne.search.alternatives import alternatives
from heterodyne.search.contenders import NEAR, near_the_chosen, still_in
from heterodyne.search.explain import paragraph
from heterodyne.search.planned import Strategy, identity, serves
from pure.build import cluster, graph, linear, profile

MODEL = graph(layers=6, width=16)


def searched(strategy: Strategy = "auto", **rehearsed: float) -> Planned:
    machines = cluster(3)
    known = profile(MODEL, machines, [linear(0.01 / s) for s in (0.7, 0.5, 0.3)], optimizer_s=0.01)
    return plan(MODEL, machines, known, global_batch_size=24, strategy=strategy, rehearsed=rehearsed, near=NEAR)


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


def test_what_a_few_steps_cannot_tell_apart_is_left_to_the_prediction() -> None:
    before = searched()
    plans = [identity(c.plan) for c in near_the_chosen(before, 6) if c.plan is not None]
    after = searched(**{name: 1.0 - 0.001 * number for number, name in enumerate(plans)})
    assert identity(after.plan) == identity(before.plan)


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


def test_a_plan_that_loses_round_after_round_is_not_run_any_more_and_others_are() -> None:
    chance = random.Random(4)
    steady = [1.0 + 0.1 * chance.random() for _ in range(12)]
    often = [own + chance.choice([-0.01, 0.02]) for own in steady]
    slow = [own + 0.2 for own in steady]
    assert still_in([[], [], []]) == [0, 1, 2]
    assert still_in([steady[:4], often[:4], slow[:4]]) == [0, 1, 2], "four rounds may be chance"
    assert still_in([slow[:5], steady[:5]]) == [1]
    assert 2 not in still_in([steady, often, slow])
    assert still_in([steady, slow[:5]]) == [0], "who is out stays out"
    best = still_in([steady, often])
    assert best
    assert all(0 <= place < 2 for place in best)

"""Differences of plans: told in the words of the plan, and only where something else would run."""

from __future__ import annotations

from hypothesis import given

from heterodyne.plan import MicroBatches, Plan, Prediction
from heterodyne.plan.diff import differences
from pure.build import cluster, graph
from pure.plan.strategies import GENERAL_PLANS, valid_plan

MODEL, MACHINES = graph(2), cluster(3)
PLAN = valid_plan(MODEL, MACHINES, [MicroBatches((4, 4)), MicroBatches((2,)), None])


@given(GENERAL_PLANS)
def test_a_plan_does_not_differ_from_itself(plan: Plan) -> None:
    assert differences(plan, plan) == ()


@given(GENERAL_PLANS, GENERAL_PLANS)
def test_plans_that_run_alike_and_only_those_have_no_difference(a: Plan, b: Plan) -> None:
    said = {"predicted": None, "reason": ""}
    if not differences(a, b):
        groups = [[[d for s in p.stages for d in s.devices] for p in plan.pipelines] for plan in (a, b)]
        told_apart = all(len({frozenset(g) for g in group}) == len(group) for group in groups)
        same = a.model_copy(update={**said, "idle": tuple(sorted(set(a.idle)))}) == b.model_copy(
            update={**said, "idle": tuple(sorted(set(b.idle)))}
        )
        assert same or not told_apart


def test_shares_devices_and_prediction_are_told() -> None:
    other = valid_plan(MODEL, MACHINES, [MicroBatches((4, 3)), None, MicroBatches((3,))])
    predicted = [Prediction(step_s=s, samples_per_s=1.0, efficiency=1.0, memory_bytes={}) for s in (0.5, 0.25)]
    lines = differences(
        PLAN.model_copy(update={"predicted": predicted[0]}), other.model_copy(update={"predicted": predicted[1]})
    )
    assert lines == (
        "n0/cpu:0: 8 samples (2x4) -> 7 samples (1x4+1x3)",
        "n0/cpu:1: 2 samples (1x2) -> no share",
        "n0/cpu:2: no share -> 3 samples (1x3)",
        "n0/cpu:2: no longer idle",
        "n0/cpu:1: now idle",
        "predicted step: 500 ms -> 250 ms",
    )


def test_order_counts_since_it_decides_who_takes_which_samples() -> None:
    turned = PLAN.model_copy(update={"pipelines": PLAN.pipelines[::-1]})
    assert differences(PLAN, turned) == ("order of the pipelines: n0/cpu:1, n0/cpu:0",)


def test_what_does_not_change_the_run_is_no_difference() -> None:
    assert differences(PLAN, PLAN.model_copy(update={"reason": "another"})) == ()

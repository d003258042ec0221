"""The costs of a plan: one value for each action of each rank, from the measurements of that rank's device."""

from __future__ import annotations

import pytest

from heterodyne.cost.model import CostModel
from heterodyne.cost.recipe import Recipe
from heterodyne.errors import MeasureError
from heterodyne.plan import Action, MicroBatches
from pure.build import cluster, graph, linear, profile
from pure.plan.strategies import valid_plan

MODEL, MACHINES = graph(4), cluster(3)
MEASURED = profile(
    MODEL,
    MACHINES,
    [linear(0.3), linear(0.6), linear(0.9)],
    reduce=lambda size: 1e-3 + size * 1e-6,
    optimizer_s=0.2,
    overhead_s=0.05,
    overlap=1.7,
)
COSTS = CostModel(graph=MODEL, cluster=MACHINES, profile=MEASURED)
PLAN = valid_plan(MODEL, MACHINES, [MicroBatches((1, 4)), MicroBatches(), None], bucket_bytes=600)


@pytest.mark.tour("cost/")
def test_each_action_has_the_seconds_of_its_device_and_size() -> None:
    costs = COSTS.of(PLAN)
    first = costs.ranks[0]
    assert first is not None
    assert first.stages[0].forward_s[0] == pytest.approx(0.1)
    assert first.stages[0].backward_s[1] == pytest.approx(0.8)
    assert first.step_s == pytest.approx(0.2)
    assert first.clip_s == pytest.approx(0.2 * 3 / 7)
    # two of the three processors that were measured: as many bytes in shared memory, two thirds of the waiting
    assert costs.collective_s(Action(0, "REDUCE_GRAD", 0)) == pytest.approx(2 / 3 * 1e-3 + 768e-6, rel=1e-6)


def test_what_a_rank_does_not_do_has_no_cost() -> None:
    costs = COSTS.of(PLAN)
    assert costs.ranks[2] is None
    with pytest.raises(KeyError, match="no cost of"):
        costs.collective_s(Action(0, "REDUCE_GRAD", 99))


def test_a_rank_without_a_share_is_ready_at_once_and_updates_all_the_same() -> None:
    zero = COSTS.of(PLAN).ranks[1]
    assert zero is not None
    assert zero.stages[0].forward_s == zero.stages[0].backward_s == ()
    assert set(zero.ready.values()) == {()}
    assert zero.compute_s == pytest.approx(0.2 * (1 + 3 / 7) + 0.05)


def test_overlap_is_kept_within_what_it_can_mean() -> None:
    first = COSTS.of(PLAN).ranks[0]
    assert first is not None
    assert first.overlap == 1.0


def test_the_lower_bound_is_the_longest_rank_or_all_collectives() -> None:
    costs = COSTS.of(PLAN)
    first = costs.ranks[0]
    assert first is not None
    assert costs.lower_bound_s == pytest.approx(0.3 * 5 + 0.2 * 10 / 7 + 0.05) == pytest.approx(first.compute_s)


@pytest.mark.parametrize(
    ("recipe", "states", "ratio"),
    [
        (Recipe(), 2, 3 / 7),
        (Recipe(optimizer="sgd"), 1, 3 / 5),
        (Recipe(optimizer="sgd", momentum=0.0), 0, 1.0),
        (Recipe(clip=False), 2, 0.0),
    ],
)
def test_recipes(recipe: Recipe, states: int, ratio: float) -> None:
    assert (recipe.states, recipe.clip_to_step) == (states, ratio)


@pytest.mark.tour("law 4")
def test_a_device_that_was_not_measured_is_named() -> None:
    with pytest.raises(MeasureError, match="n0/cpu:3 was not measured"):
        CostModel(graph=MODEL, cluster=cluster(4), profile=MEASURED).measured("n0/cpu:3")


@pytest.mark.parametrize("nodes", [1, 2])
def test_sharded_state_carries_new_weights_and_travels_as_messages_between_machines(nodes: int) -> None:
    """Two equal shards of an update of 0.2 s, 7 passes: half of it, and 2 passes for the own half into the buffer and for all out of it.
    Links are free here, an all-reduce is not."""
    machines = cluster(2, nodes=nodes)
    measured = profile(MODEL, machines, [linear(0.3)] * 2, reduce=lambda size: 1e-3 + size * 1e-6, optimizer_s=0.2)
    costs = CostModel(graph=MODEL, cluster=machines, profile=measured)
    whole = valid_plan(MODEL, machines, [MicroBatches((1, 4)), MicroBatches((1,))], bucket_bytes=600)
    first, second = (costs.of(whole.model_copy(update={"zero": zero})) for zero in (1, 2))
    for each in (first, second):
        assert each.ranks[0] is not None
        assert each.ranks[0].step_s == pytest.approx(0.2 * (1 / 2 + 2 / 7 * 3 / 2), rel=0.1)
    assert min(first.reduce_s) > 2e-4
    assert (max(second.reduce_s) < 1e-9) == (nodes > 1)

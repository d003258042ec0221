"""Stages that lie in parts on several ranks: their passes begin when the last has come, and end for all at once."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from heterodyne.cost.stage import StageCosts
from heterodyne.cost.step import RankCosts, StepCosts
from heterodyne.errors import PlanError
from heterodyne.plan import Action, Program
from heterodyne.plan.schedules import SCHEDULES
from heterodyne.sim import Simulation, simulate
from pure.sim.pipelines import links, stage_costs, with_messages

SECONDS = st.integers(1, 32).map(lambda n: n / 8)  # exact in binary, so that sums are exact too


def listed(order: str) -> tuple[Action, ...]:
    return tuple(map(Action.parse, order.split()))


def both(order: str, *, other: str | None = None) -> Program:
    return Program(ranks=(listed(order), listed(order if other is None else other)))


def team(stage: StageCosts, *ranks: int) -> StageCosts:
    return replace(stage, together=ranks)


def of_first_step(played: Simulation) -> dict[tuple[int, str], tuple[float, float]]:
    return {(s.rank, str(s.action)): (s.start_s, s.end_s) for s in played.spans if s.step == 0}


def test_a_pass_begins_when_the_last_of_its_ranks_has_come() -> None:
    stage = team(stage_costs(2, f=2, i=2, w=1), 0, 1)
    costs = StepCosts(ranks=(RankCosts(stages={0: stage}), RankCosts(stages={0: stage}, overhead_s=0.5)))
    when = of_first_step(simulate(both("0F0 0F1 0B0 0B1"), costs))
    assert when[0, "0F0"] == when[1, "0F0"] == (0.5, 2.5)
    assert when[0, "0B1"] == when[1, "0B1"] == (7.5, 10.5)


def test_the_gradients_of_weights_are_made_by_each_rank_for_itself() -> None:
    quick, slow = (team(stage_costs(2, f=1, i=1, w=w), 0, 1) for w in (1, 3))
    costs = StepCosts(ranks=(RankCosts(stages={0: quick}), RankCosts(stages={0: slow})))
    played = simulate(both("0F0 0I0 0W0 0F1 0I1 0W1"), costs)
    when = of_first_step(played)
    assert (when[0, "0W0"], when[1, "0W0"]) == ((2, 3), (2, 5))
    assert when[0, "0F1"] == when[1, "0F1"] == (5, 6)
    assert played.step_s == 10
    assert played.wait_s == (4, 0)


def test_what_is_computed_again_is_done_together_ahead_of_the_backward_or_inside_it() -> None:
    again = replace(team(stage_costs(1, f=2, i=1, w=1), 0, 1), recompute_s=(2.0,))
    costs = StepCosts(ranks=(RankCosts(stages={0: again}), RankCosts(stages={0: again}, overhead_s=1.0)))
    inside, ahead = (of_first_step(simulate(both(order), costs)) for order in ("0F0 0B0", "0F0 0R0 0B0"))
    assert inside[0, "0B0"] == (3, 7)
    assert ahead[0, "0R0"] == ahead[1, "0R0"] == (3, 5)
    assert ahead[0, "0B0"] == (5, 7)


def test_seconds_of_exchanges_are_told_with_those_of_what_is_computed_again() -> None:
    sent = StageCosts(
        forward_s=(0.5,) * 2, backward_s=(0.25,) * 2, input_s=(0.25,) * 2, weight_s=(0.0,) * 2, recompute_s=(0.125,) * 2
    )
    stage = replace(team(stage_costs(2, f=2, i=1, w=1), 0, 1), recompute_s=(1.0, 1.0), exchanges=sent)
    costs = StepCosts(ranks=(RankCosts(stages={0: stage}),) * 2)
    for order in ("0F0 0F1 0B0 0B1", "0F0 0R0 0F1 0B0 0R1 0B1", "0F0 0F1 0I0 0W0 0I1 0W1"):
        assert simulate(both(order), costs).exchange_s == (1.75, 1.75)
    plain = StepCosts(ranks=(RankCosts(stages={0: replace(stage, exchanges=None)}),) * 2)
    assert simulate(both("0F0 0F1 0B0 0B1"), plain).exchange_s == (0, 0)


def test_a_bucket_becomes_complete_inside_a_backward_that_is_done_together() -> None:
    """Half of it on one rank, a quarter on the other: the sum starts when both have their part."""
    stage = team(stage_costs(1, f=1, i=2, w=2), 0, 1)
    ranks = tuple(RankCosts(stages={0: stage}, ready={0: ((0, at),)}, step_s=0.5) for at in (0.5, 0.25))
    costs = StepCosts(ranks=ranks, reduce_s=(1.0,))
    when = of_first_step(simulate(both("0F0 0B0 0REDUCE_GRAD0 0STEP"), costs))
    assert when[0, "0B0"] == when[1, "0B0"] == (1, 5)
    assert when[0, "0REDUCE_GRAD0"] == when[1, "0REDUCE_GRAD0"] == (3, 4)
    assert when[0, "0STEP"] == (5, 5.5)


def test_who_is_disturbed_keeps_the_others_waiting() -> None:
    stage = team(stage_costs(1, f=1, i=2, w=2), 0, 1)
    ranks = tuple(RankCosts(stages={0: stage}, ready={0: ((0, 0.5),)}, overlap=overlap) for overlap in (0.5, 0.0))
    when = of_first_step(simulate(both("0F0 0B0 0REDUCE_GRAD0"), StepCosts(ranks=ranks, reduce_s=(1.0,))))
    assert when[0, "0B0"] == when[1, "0B0"] == (1, 5.5)  # a second in flight costs half of one


def test_ranks_that_do_not_come_to_the_same_pass_are_named() -> None:
    stage = team(stage_costs(2, f=1, i=1, w=1), 0, 1)
    costs = StepCosts(ranks=(RankCosts(stages={0: stage}),) * 2)
    with pytest.raises(
        PlanError, match=r"rank 0 at 0F1, to which the other devices of its stage do not come; rank 1 at 0B0"
    ):
        simulate(both("0F0 0F1 0B0 0B1", other="0F0 0B0 0F1 0B1"), costs)
    with pytest.raises(PlanError, match="for ever"):
        simulate(both("0F0 0F1 0B0 0B1", other="0F0"), costs)


@given(st.sampled_from(["1F1B", "GPipe", "ZBH1"]), st.integers(1, 5), SECONDS, SECONDS, st.integers(1, 3))
def test_a_pair_in_a_pipeline_is_as_one_device_would_be(
    schedule: str, micro_batches: int, f: float, w: float, seconds: int
) -> None:
    """Two places; two ranks do the first one together, and each sends its half of what the second one reads."""
    one, other = (stage_costs(micro_batches, f, f, w, kept=8) for _ in range(2))
    orders = SCHEDULES[schedule].orders(2, 1, micro_batches)
    update = (Action(0, "STEP"),)
    first, second = (actions + update for actions in with_messages(orders, (0, 1)).ranks)
    wires = links((0, 1), micro_batches, seconds / 8, latency_s=0.25)
    alone = StepCosts(ranks=(RankCosts(stages={0: one}), RankCosts(stages={1: other})), routes=wires)
    pair = RankCosts(stages={0: team(one, 0, 2)})
    there, back = wires
    more = (
        replace(there, source=(2, 0), link="2 -> 1"),
        replace(back, destination=(2, 0), link="1 -> 2"),
    )
    together = StepCosts(ranks=(pair, RankCosts(stages={1: other}), pair), routes=(*wires, *more))
    expected = simulate(Program(ranks=(first, second)), alone)
    played = simulate(Program(ranks=(first, second, first)), together)
    assert played.step_s == pytest.approx(expected.step_s)
    assert played.step_s >= together.lower_bound_s - 1e-9
    assert played.busy_s == pytest.approx((*expected.busy_s, expected.busy_s[0]))
    assert played.peak_bytes == (*expected.peak_bytes, expected.peak_bytes[0])
    slower = replace(together, ranks=(pair, together.ranks[1], replace(pair, overhead_s=1.0)))
    assert simulate(Program(ranks=(first, second, first)), slower).step_s >= played.step_s - 1e-9

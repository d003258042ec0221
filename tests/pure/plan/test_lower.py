"""Lowering of pipelines: what has to come before and behind each pass, and programs that would wait for ever."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from heterodyne.errors import PlanError
from heterodyne.plan import Action, Layout, MicroBatches, Pipeline, Plan, Program, Region, Stage
from heterodyne.plan.lower import lower
from heterodyne.plan.schedules import SCHEDULES
from heterodyne.plan.verify import program_violations, require_runnable
from pure.build import cluster, graph

MODEL, MACHINES = graph(6), cluster(4)
NAMES = [device.id for device in MACHINES.devices]


def stage(start: int, stop: int, *ranks: int) -> Stage:
    shares = Layout(shares=tuple(1 for _ in ranks))
    return Stage(ops=(start, stop), devices=tuple(NAMES[r] for r in ranks), regions=(Region(layout=shares),))


def plan_of(*pipelines: Pipeline, schedule: str = "1F1B") -> Plan:
    used = {device for pipeline in pipelines for part in pipeline.stages for device in part.devices}
    return Plan(
        model=MODEL.fingerprint,
        cluster=MACHINES.fingerprint,
        global_batch_size=sum(p.micro_batches.samples for p in pipelines),
        schedule=schedule,
        pipelines=pipelines,
        idle=tuple(name for name in NAMES if name not in used),
    )


def rows(plan: Plan) -> list[str]:
    return [" ".join(map(str, row)) for row in lower(plan, MODEL, MACHINES).program.ranks]


TWO_STAGES = Pipeline(micro_batches=MicroBatches((2, 2)), stages=(stage(0, 7, 0), stage(7, 14, 1)))


@pytest.mark.tour("law 3", "plan/")
def test_two_stages_send_forward_and_back() -> None:
    first, second, *idle = rows(plan_of(TWO_STAGES))
    assert first == "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1 0CLIP 0STEP"
    assert second == "1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1 0CLIP 0STEP"
    assert idle == ["", ""]


def test_gradients_are_reduced_between_the_owners_of_the_same_parameters() -> None:
    whole = Pipeline(micro_batches=MicroBatches((1,)), stages=(stage(0, 14, 2),))
    first, second, third, _ = rows(plan_of(TWO_STAGES, whole))
    reduced = [{word for word in row.split() if "REDUCE" in word} for row in (first, second, third)]
    assert reduced[0].isdisjoint(reduced[1])
    assert reduced[0] | reduced[1] == reduced[2]
    assert all(reduced)


def test_stages_of_one_place_exchange_nothing() -> None:
    v = Pipeline(
        micro_batches=MicroBatches((1, 1)), stages=(stage(0, 4, 0), stage(4, 7, 1), stage(7, 9, 1), stage(9, 14, 0))
    )
    _, turn, *_ = rows(plan_of(v, schedule="ZBVZeroBubble"))
    words = turn.split()
    assert "1SEND_F0" not in words
    assert "2RECV_F0" not in words
    assert "2SEND_F0" in words


@given(
    st.sampled_from(sorted(name for name, made in SCHEDULES.items() if not made.asynchronous)),
    st.integers(1, 4),
    st.integers(0, 6),
)
def test_every_schedule_can_run(name: str, places: int, micro_batches: int) -> None:
    chosen = SCHEDULES[name]
    homes = chosen.stage_places(places, chosen.chunks or 2)
    borders = [round(14 * n / len(homes)) for n in range(len(homes) + 1)]
    stages = tuple(stage(a, b, home) for a, b, home in zip(borders, borders[1:], homes, strict=False))
    pipeline = Pipeline(micro_batches=MicroBatches((1,) * micro_batches), stages=stages)
    others = () if micro_batches else (Pipeline(micro_batches=MicroBatches((1,)), stages=(stage(0, 14, 3),)),)
    if others and places == 4:
        return
    made = plan_of(pipeline, *others, schedule=name)
    lowered = lower(made, MODEL, MACHINES)
    assert program_violations(lowered.program, lowered.specs) == ()


def test_ranks_that_wait_for_each_other_are_found() -> None:
    lowered = lower(plan_of(TWO_STAGES), MODEL, MACHINES)
    first, second, *rest = (list(row) for row in lowered.program.ranks)
    first.insert(0, first.pop(4))  # waits for a gradient before it has sent anything
    broken = program_violations(Program(ranks=(tuple(first), tuple(second), *map(tuple, rest))), lowered.specs)
    assert any("0RECV_B0" in sentence for sentence in broken)

    order = ("0F0 0B0 0F1 0B1", "1F1 1B1 1F0 1B0")
    crossed = plan_of(TWO_STAGES.model_copy(update={"order": order}))
    with pytest.raises(PlanError, match="rank 0 waits at 0RECV_B0 for 1SEND_B0 of rank 1, which waits too"):
        lower(crossed, MODEL, MACHINES)


def test_what_nobody_needs_is_found() -> None:
    lowered = lower(plan_of(TWO_STAGES), MODEL, MACHINES)
    ranks = [list(row) for row in lowered.program.ranks]
    ranks[0].insert(2, Action(1, "F", 0))
    with pytest.raises(PlanError, match="rank 0 runs 1F0, but holds stage 0: remove it"):
        require_runnable(Program(ranks=tuple(map(tuple, ranks))), lowered.specs)

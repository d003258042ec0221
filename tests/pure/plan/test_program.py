"""Programs: what a plan lowers to can run, and each way to spoil a program is found and named."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from heterodyne.errors import PlanError
from heterodyne.plan import Action, MicroBatches, Program
from heterodyne.plan.lower import lower
from heterodyne.plan.traffic import RankSpec
from heterodyne.plan.verify import collective_order, program_violations, require_runnable
from pure.build import cluster, graph
from pure.plan.strategies import MICRO_BATCHES, valid_plan

MODEL, MACHINES = graph(2), cluster(3)
LAST = ["0REDUCE_GRAD0", "0REDUCE_GRAD1", "0REDUCE_GRAD2", "0CLIP", "0STEP"]
ROW = [Action.parse(text) for text in ["0F0", "0B0", "0F1", "0B1", *LAST]]
DUTIES = [None if count is None else RankSpec(micro_batches=count, buckets=(0, 1, 2)) for count in (2, 0, 2, None)]


def rows() -> list[list[Action]]:
    return [list(ROW), list(ROW[4:]), list(ROW), []]


def program(ranks: list[list[Action]]) -> Program:
    return Program(ranks=tuple(map(tuple, ranks)))


@pytest.mark.tour("plan/")
@given(st.lists(st.none() | MICRO_BATCHES, min_size=3, max_size=3), st.booleans(), st.integers(1, 2000))
def test_what_a_plan_lowers_to_can_run(micro_batches: list[MicroBatches | None], clip: bool, size: int) -> None:
    if not any(m is not None and m.samples for m in micro_batches):
        return
    plan = valid_plan(MODEL, MACHINES, micro_batches, bucket_bytes=size)
    lowered = lower(plan, MODEL, MACHINES, clip=clip)
    buckets = [b for b in lowered.weights.buckets if len(b.owners) > 1]
    assert program_violations(lowered.program, lowered.specs) == ()
    for m, actions in zip(micro_batches, lowered.program.ranks, strict=True):
        kinds = [action.kind for action in actions]
        expected = 0 if m is None else 2 * len(m) + len(buckets) + clip + 1
        assert len(kinds) == expected
        assert kinds.count("CLIP") == (clip and m is not None)


def test_one_micro_batch_of_activations_is_alive_at_a_time() -> None:
    (row, *_) = lower(valid_plan(MODEL, MACHINES, [MicroBatches((2, 2, 1)), None, None]), MODEL, MACHINES).program.ranks
    assert " ".join(map(str, row)).startswith("0F0 0B0 0F1 0B1 0F2 0B2 0CLIP")


def test_a_plan_that_breaks_a_rule_is_not_lowered() -> None:
    plan = valid_plan(MODEL, MACHINES, [MicroBatches((2,)), None, None]).model_copy(update={"global_batch_size": 3})
    with pytest.raises(PlanError, match="add up to 2 samples"):
        lower(plan, MODEL, MACHINES)


def test_the_example_can_run() -> None:
    assert program_violations(program(rows()), DUTIES) == ()


@given(st.integers(0, 2), st.data())
def test_a_missing_action_is_found(rank: int, data: st.DataObject) -> None:
    ranks = rows()
    gone = ranks[rank].pop(data.draw(st.integers(0, len(ranks[rank]) - 1)))
    found = program_violations(program(ranks), DUTIES)
    if gone.kind == "CLIP":
        assert found == ()  # clipping is a choice
    else:
        named = {"STEP": "updates 0 times", "REDUCE_GRAD": f"reduces bucket {gone.index} 0 times"}
        assert any(f"rank {rank} {named.get(gone.kind, f'runs {gone} 0 times')}" in sentence for sentence in found)


@given(st.integers(0, 2), st.data())
def test_an_action_given_twice_is_found(rank: int, data: st.DataObject) -> None:
    ranks = rows()
    twice = data.draw(st.sampled_from(ranks[rank]))
    ranks[rank].insert(data.draw(st.integers(0, len(ranks[rank]))), twice)
    named = {"STEP": "updates 2 times", "CLIP": "clips 2 times", "REDUCE_GRAD": f"reduces bucket {twice.index} 2 times"}
    found = program_violations(program(ranks), DUTIES)
    assert any(f"rank {rank} {named.get(twice.kind, f'runs {twice} 2 times')}" in sentence for sentence in found)


@given(st.integers(0, 2), st.data())
def test_two_actions_swapped_are_found_unless_the_order_is_free(rank: int, data: st.DataObject) -> None:
    ranks = rows()
    row = ranks[rank]
    i, j = sorted(data.draw(st.lists(st.integers(0, len(row) - 1), min_size=2, max_size=2, unique=True)))
    row[i], row[j] = row[j], row[i]
    free = {("F", "F"), ("B", "B")}  # micro-batches may run in any order
    kinds = (row[i].kind, row[j].kind)
    early = kinds == ("F", "B") and row[i].index != row[j].index  # 1F 0B: both forwards first, which is allowed
    found = program_violations(program(ranks), DUTIES)
    if not (kinds in free or early):
        assert found, program(ranks)


@pytest.mark.parametrize(
    ("says", "spoil"),
    [
        ("rank 0 runs 0B1 before 0F1", lambda r: r[0].__setitem__(slice(2, 4), [ROW[3], ROW[2]])),
        ("rank 0 reduces bucket 0 before its last backward, 0B1", lambda r: r[0].insert(1, r[0].pop(4))),
        ("rank 0 runs 0REDUCE_GRAD2 after STEP", lambda r: r[0].append(r[0].pop(6))),
        ("rank 2 clips before 0REDUCE_GRAD2", lambda r: r[2].insert(6, r[2].pop(7))),
        ("rank 0 runs 0F7, but has 2 micro-batches", lambda r: r[0].insert(0, Action(0, "F", 7))),
        ("rank 2 reduces bucket 9, but shares 0, 1, 2", lambda r: r[2].insert(4, Action(0, "REDUCE_GRAD", 9))),
        (
            "rank 1 reduces bucket 1 0 times: every owner reduces each bucket once, also without a share",
            lambda r: r[1].pop(1),
        ),
        ("rank 3 is idle, yet runs 0STEP", lambda r: r[3].append(Action(0, "STEP"))),
        ("it has 3 ranks, the cluster has 4", lambda r: r.pop()),
        ("meet in different orders", lambda r: r[1].insert(0, r[1].pop(1))),
    ],
)
def test_each_fault_is_named(says: str, spoil: Callable[[list[list[Action]]], object]) -> None:
    ranks = rows()
    spoil(ranks)
    assert any(says in sentence for sentence in program_violations(program(ranks), DUTIES))
    with pytest.raises(PlanError, match="the program cannot run"):
        require_runnable(program(ranks), DUTIES)


SHARED = [
    Action.parse(text)
    for line in (
        "0UNSHARD1 0UNSHARD0 0F0 0F1 0OFFLOAD0 0RELOAD0 0B0 0B1",
        "0RESHARD0 0SCATTER0 0RESHARD1 0SCATTER1 0CLIP 0STEP",
    )
    for text in line.split()
]
BYSTANDER = [action for action in SHARED if action.kind not in ("F", "B", "OFFLOAD", "RELOAD")]


@pytest.mark.parametrize(
    ("says", "spoil"),
    [
        ("", lambda r: r),
        ("rank 0 runs 0F0 while the parameters of bucket 1 are sharded", lambda r: r[0].pop(0)),
        ("rank 0 keeps the parameters of buckets 1 gathered", lambda r: r[0].pop(10)),
        (
            "rank 0 runs 1UNSHARD1, and the parameters of bucket 1 are gathered",
            lambda r: r[0].insert(2, Action(1, "UNSHARD", 1)),
        ),
        ("meet in different orders", lambda r: r[0].insert(0, r[0].pop(1))),
        (
            "rank 0 waits at 0F0 for 0UNSHARD0 of rank 1",
            lambda r: r.__setitem__(1, [a for a in BYSTANDER if "SHARD" not in a.kind]),
        ),
        ("rank 0 runs 0RELOAD0 before 0OFFLOAD0: nothing has left", lambda r: r[0].insert(4, r[0].pop(5))),
        ("rank 0 runs 0OFFLOAD0 out of its place", lambda r: r[0].insert(6, r[0].pop(4))),
        ("rank 0 runs 0RELOAD0 2 times", lambda r: r[0].insert(6, r[0][5])),
        ("rank 1 runs 0RELOAD0, but", lambda r: r[1].insert(2, SHARED[5])),
    ],
)
def test_faults_of_what_is_gathered_and_of_what_hosts_keep_are_named(
    says: str, spoil: Callable[[list[list[Action]]], object]
) -> None:
    """Two pipelines that share all parameters, one of them without a sample."""
    common = {"buckets": (0, 1), "zero": 3, "readers": {0: (0,), 1: (0,)}, "hosted": {0: 1}}
    duties = [RankSpec(pipeline=number, micro_batches=count, **common) for number, count in enumerate((2, 0))]
    ranks = [list(SHARED), list(BYSTANDER)]
    spoil(ranks)
    told = program_violations(program(ranks), duties)
    assert any(says in sentence for sentence in told) if says else not told


@given(st.lists(st.permutations(range(4)), min_size=1, max_size=4))
def test_the_order_of_collectives_agrees_with_every_rank_or_there_is_none(orders: list[list[int]]) -> None:
    made = program([[Action(0, "REDUCE_GRAD", i) for i in order] for order in orders])
    if len({tuple(order) for order in orders}) == 1:
        assert [action.index for action, _ in collective_order(made)] == orders[0]
    else:
        with pytest.raises(PlanError, match="wait for each other forever"):
            collective_order(made)


def test_ranks_that_share_no_collective_need_no_common_order() -> None:
    made = program([[Action(0, "REDUCE_GRAD", 0)], [Action(1, "REDUCE_GRAD", 0)]])
    assert sorted(ranks for _, ranks in collective_order(made)) == [(0,), (1,)]


@given(st.builds(Action, st.integers(0, 9), st.sampled_from(["F", "B", "REDUCE_GRAD"]), st.integers(0, 99)))
def test_actions_are_read_as_they_are_written(action: Action) -> None:
    assert Action.parse(str(action)) == action


@pytest.mark.parametrize("text", ["", "F0", "0F", "0STEP1", "0X1", "0f1", "0REDUCE_GRAD", "F", "0 F0"])
def test_what_is_no_action_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not an action"):
        Action.parse(text)

"""Where parameters are gathered and let go of, around the passes of stages."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from heterodyne.plan.program import Action, Program
from heterodyne.plan.schedules import SCHEDULES
from heterodyne.plan.unsharding import RankPasses, with_unsharding
from heterodyne.plan.verify import collective_order


def of_one(
    order: Sequence[Action], readers: Mapping[int, Sequence[int]], kept: frozenset[int] = frozenset()
) -> tuple[Action, ...]:
    (actions,) = with_unsharding([RankPasses(actions=order, readers=readers, kept=kept)])
    return actions


def most_at_once(actions: tuple[Action, ...]) -> int:
    """Buckets whose parameters are there."""
    gathered, most = 0, 0
    for action in actions:
        gathered += (action.kind == "UNSHARD") - (action.kind == "RESHARD")
        most = max(most, gathered)
    return most


@given(st.integers(1, 12), st.integers(1, 6))
def test_stages_in_turn_are_gathered_twice_each_but_the_last_two_whatever_the_micro_batches(
    stages: int, micro_batches: int
) -> None:
    """The last stage turns round at once, and the one before it comes next. Two stages are there at a time: one that runs, and the next."""
    (order,) = SCHEDULES["GPipe"].orders(1, stages, micro_batches)
    readers = {bucket: (stages - 1 - bucket,) for bucket in range(stages)}
    actions = of_one(order, readers)
    assert sum(action.kind == "UNSHARD" for action in actions) == max(1, 2 * stages - 2)
    assert most_at_once(actions) == min(2, stages)
    assert [action for action in actions if action.kind in ("F", "B")] == list(order)
    place = {action: number for number, action in enumerate(actions)}
    for bucket in range(stages):
        last = max(place[Action(stages - 1 - bucket, "B", index)] for index in range(micro_batches))
        assert last < place[Action(0, "SCATTER", bucket)] <= last + 3  # right behind it
    once = of_one(order, readers, frozenset(range(stages)))
    assert sum(action.kind == "UNSHARD" for action in once) == most_at_once(once) == stages


@pytest.mark.parametrize("schedule", ["1F1B", "ZBH1"])
def test_a_stage_whose_passes_alternate_stays_gathered(schedule: str) -> None:
    for place, order in enumerate(SCHEDULES[schedule].orders(3, 1, 6)):
        actions = of_one(order, {0: (place,)})
        kinds = [action.kind for action in actions]
        assert (kinds.count("UNSHARD"), kinds[0], kinds[-2:]) == (1, "UNSHARD", ["RESHARD", "SCATTER"])


def test_a_bucket_that_several_stages_read_is_reduced_behind_the_last_of_them_and_in_order() -> None:
    (order,) = SCHEDULES["GPipe"].orders(1, 3, 2)
    actions = of_one(order, {0: (2,), 1: (0, 2), 2: (1,)})
    found = [action.index for action in actions if action.kind == "SCATTER"]
    assert found == [0, 1, 2]
    place = {action: number for number, action in enumerate(actions)}
    assert place[Action(0, "B", 1)] < place[Action(0, "SCATTER", 1)] < place[Action(0, "SCATTER", 2)]


def test_alone_without_a_micro_batch_everything_is_reduced_all_the_same() -> None:
    assert of_one((), {0: (0,), 1: (1,)}) == (Action(0, "SCATTER", 0), Action(0, "SCATTER", 1))


@st.composite
def pipelines(draw: st.DrawFn) -> list[RankPasses]:
    """Ranks of pipelines that hold the same buckets: cut anywhere, in any schedule, with any number of micro-batches, also none."""
    buckets = draw(st.integers(1, 6))
    tied = draw(st.booleans())
    ranks = []
    for _ in range(draw(st.integers(2, 3))):
        schedule = SCHEDULES[draw(st.sampled_from(["GPipe", "1F1B", "Interleaved1F1B", "ZBH1"]))]
        places = draw(st.integers(1, 3)) if schedule.chunks in (None, 1) else draw(st.integers(2, 3))
        chunks = schedule.chunks or draw(st.integers(1, 3))
        count = draw(st.integers(0, 5))
        homes = schedule.stage_places(places, chunks)
        cuts = sorted(draw(st.integers(0, len(homes) - 1)) for _ in range(buckets))
        reads = {bucket: {stage} for bucket, stage in enumerate(reversed(cuts))}
        if tied:  # what the first stage reads, the last one reads again
            reads[buckets - 1].add(len(homes) - 1)
        orders = schedule.orders(places, chunks, count) if count else ((),) * places
        for place, order in enumerate(orders):
            own = {b: tuple(s for s in sorted(of) if homes[s] == place) for b, of in reads.items()}
            ranks.append(RankPasses(actions=order, readers={bucket: of for bucket, of in own.items() if of}))
    return ranks


@given(pipelines())
def test_all_owners_gather_and_reduce_as_often_and_in_one_order_whatever_their_micro_batches(
    ranks: list[RankPasses],
) -> None:
    made = with_unsharding(ranks)
    for _, members in collective_order(Program(ranks=made)):
        assert len(set(members)) == len(members)
    owners = Counter(bucket for rank in ranks for bucket in rank.readers)
    used = {bucket for rank in ranks if rank.actions for bucket in rank.readers}
    told = Counter(action for actions in made for action in actions)
    for action, times in told.items():
        if action.kind in ("UNSHARD", "RESHARD", "SCATTER"):
            assert times == owners[action.index or 0], action
    assert {action.index for action in told if action.kind == "UNSHARD"} == used
    for rank, actions in zip(ranks, made, strict=True):
        there: set[int | None] = set()
        for action in actions:
            match action.kind:
                case "UNSHARD" | "RESHARD":
                    assert (action.index in there) == (action.kind == "RESHARD")
                    there ^= {action.index}
                case "F" | "B" | "I":
                    assert {b for b, stages in rank.readers.items() if action.stage in stages} <= there
        assert not there
        reduced = [action.index or 0 for action in actions if action.kind == "SCATTER"]
        assert reduced == sorted(reduced), "what computes the gradients reduces them in this order"

"""How a batch of any size is spread for evaluation."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from heterodyne.plan.micro_batches import MicroBatches
from heterodyne.plan.placement import Placement, RankRole
from heterodyne.runtime.evaluation import evaluation_parts

sizes = st.lists(st.lists(st.integers(1, 5), max_size=4), min_size=1, max_size=6).filter(lambda s: any(s))


@given(sizes=sizes, batch=st.integers(0, 100))
def test_every_sample_is_taken_once_in_parts_that_fit_and_shares_that_are_the_plans(
    sizes: list[list[int]], batch: int
) -> None:
    places = tuple(
        RankRole(rank=rank, device=str(rank), pipeline=rank, micro_batches=MicroBatches(tuple(own)))
        for rank, own in enumerate(sizes)
    )
    parts = evaluation_parts(Placement(places=places), batch)
    assert list(parts) == list(range(len(sizes)))
    taken = [sample for first, own in parts.values() for sample in range(first, first + sum(own))]
    assert taken == list(range(batch))
    planned = sum(map(sum, sizes))
    for own, (_, cut) in zip(sizes, parts.values(), strict=True):
        assert all(size <= max(own) for size in cut)
        assert abs(sum(cut) - batch * sum(own) / planned) <= 1

"""Who keeps the state of which elements: every element has one owner, shards are as long as their shares, and whole weights stay whole."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from heterodyne.plan.micro_batches import MicroBatches
from heterodyne.plan.state_shards import cut_by_shares, sharded_bucket
from heterodyne.plan.weights import PlannedWeights
from pure.build import cluster, graph
from pure.plan.strategies import valid_plan

MODEL, MACHINES = graph(5), cluster(4)
PLAN = valid_plan(MODEL, MACHINES, [MicroBatches((size,)) for size in (2, 1, 3, 2)])
SIZES = {parameter.name: parameter.numel for parameter in MODEL.parameters}
shares_of = st.lists(st.integers(0, 9), min_size=4, max_size=4)


@given(elements=st.integers(0, 1000), shares=st.lists(st.integers(0, 9), min_size=1, max_size=6))
def test_ranges_are_as_long_as_shares(elements: int, shares: list[int]) -> None:
    ranges = cut_by_shares(elements, shares)
    assert [start for start, _ in ranges] == [0, *(stop for _, stop in ranges[:-1])]
    assert ranges[-1][1] == elements
    total = sum(shares)
    for (start, stop), share in zip(ranges, shares, strict=True):
        assert abs((stop - start) - elements * (share / total if total else 1 / len(shares))) < 1
        assert share or not total or start == stop


@given(shares=shares_of, whole=st.booleans(), bucket_bytes=st.sampled_from([1, 100, 10_000]))
def test_every_element_has_one_owner(shares: list[int], whole: bool, bucket_bytes: int) -> None:
    plan = PLAN.model_copy(update={"bucket_bytes": bucket_bytes})
    of = dict(zip(plan.devices, shares, strict=True))
    for bucket in PlannedWeights.of(plan, MODEL).buckets:
        made = sharded_bucket(bucket, MODEL, of, whole_weights=whole)
        taken = sorted((own.part.name, own.start, own.stop) for own in made.slices)
        for name in bucket.parameters:
            reached = 0
            for _, start, stop in [entry for entry in taken if entry[0] == name]:
                assert start == reached
                reached = stop
            assert reached == SIZES[name]
        if whole:
            assert all((own.start, own.stop) == (0, SIZES[own.part.name]) for own in made.slices)
        for own in made.slices:
            low, high = made.ranges[own.owner]
            assert low <= own.first < own.first + own.stop - own.start <= high
            assert made.of(own.owner)[own.part.name] == (own.start, own.stop)

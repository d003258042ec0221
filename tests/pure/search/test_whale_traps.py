"""Four traps in Whale's algorithm 1 (Jia et al., ATC 2022), each stepped around.

1. As printed, a device that is over its memory leaves the list after one shift, although it may still be over. With
   speeds 100/10/10, memory 10/16/16 and a TaskGraph of 40, it ends at twice the memory of the fast device.
2. It takes memory in proportion to the share; but weights and optimizer states do not shrink.
3. Unequal shares make a plain mean of gradients wrong. Weighting is the runtime's; the plan gives it exact counts.
4. Operations over the batch (BatchNorm) see only their part of it.
"""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from heterodyne.cost.memory import MemoryAssumptions
from heterodyne.cost.model import CostModel
from heterodyne.errors import InfeasibleError
from heterodyne.search.balance import balance
from heterodyne.search.planner import plan
from pure.build import cluster, graph, linear, profile

BARE = MemoryAssumptions(context_bytes={"cpu": 0}, fragmentation=0.0, block_bytes=0)


def capped(speeds: tuple[int, ...], memory: tuple[int, ...]) -> list[list[float]]:
    """Whale's own setting: one unit of load needs one unit of memory, and nothing is accumulated."""
    return [[n / speed for n in range(most + 1)] for speed, most in zip(speeds, memory, strict=True)]


def test_trap_1_no_device_ends_over_its_memory() -> None:
    shares = balance(capped((100, 10, 10), (10, 16, 16)), 40).shares
    assert shares == (10, 15, 15)


@given(
    st.lists(st.tuples(st.integers(1, 100), st.integers(0, 20)), min_size=1, max_size=4),
    st.integers(1, 60),
)
def test_trap_1_for_any_devices(devices: list[tuple[int, int]], load: int) -> None:
    speeds, memory = zip(*devices, strict=True)
    if sum(memory) < load:
        with pytest.raises(InfeasibleError):
            balance(capped(speeds, memory), load)
    else:
        shares = balance(capped(speeds, memory), load).shares
        assert sum(shares) == load
        assert all(share <= most for share, most in zip(shares, memory, strict=True))


def test_trap_2_a_small_share_still_needs_all_the_weights() -> None:
    """In proportion, the small device could take a small share. In truth it cannot hold the weights, and no shard of them either."""
    model = graph(4, width=64)
    fixed = CostModel(
        graph=model, cluster=cluster(1), profile=profile(model, cluster(1), [linear(1.0)]), memory=BARE
    ).memory_use("n0/cpu:0", 1)
    machines = cluster(3, memory=[2 * fixed.total, 2 * fixed.total, fixed.fixed // 4])
    planned = plan(
        model,
        machines,
        profile(model, machines, [linear(1.0)] * 3),
        global_batch_size=12,
        micro_batch_sizes=(1, 2),
        memory=BARE,
        strategy="data",
    )
    assert planned.plan.idle == ("n0/cpu:2",)
    assert [p.micro_batches.samples for p in planned.plan.pipelines] == [6, 6]
    assert "n0/cpu:2 has" in planned.unfit["n0/cpu:2"]
    assert "it lacks" in planned.unfit["n0/cpu:2"]


def test_trap_2_memory_bounds_the_micro_batch_not_the_share() -> None:
    """The fast device has little memory: it takes the larger share all the same, in smaller pieces."""
    model = graph(4, saved=100_000)
    measured = profile(model, cluster(2), [linear(0.1), linear(0.4)])
    need = {
        size: CostModel(graph=model, cluster=cluster(2), profile=measured, memory=BARE)
        .memory_use("n0/cpu:0", size)
        .total
        for size in (2, 4)
    }
    machines = cluster(2, memory=[(need[2] + need[4]) // 2, 2 * need[4]])
    made = plan(
        model, machines, measured, global_batch_size=20, micro_batch_sizes=(1, 2, 4), memory=BARE, strategy="data"
    ).plan
    fast, slow = made.pipelines
    assert (fast.micro_batches.samples, slow.micro_batches.samples) == (16, 4)
    assert max(fast.micro_batches.sizes) == 2
    assert max(slow.micro_batches.sizes) == 4


@given(st.lists(st.integers(1, 9), min_size=1, max_size=4), st.integers(1, 50))
def test_trap_3_the_plan_gives_exact_counts_to_weight_by(speeds: list[int], samples: int) -> None:
    """A sum of means over the micro-batches, each weighted by its own count over the batch, is the mean over the batch."""
    model, machines = graph(2), cluster(len(speeds))
    made = plan(
        model,
        machines,
        profile(model, machines, [linear(1 / s) for s in speeds]),
        global_batch_size=samples,
        strategy="data",
    ).plan
    values = [Fraction(n * n) for n in range(samples)]
    weighted = Fraction(0)
    for first, pipeline in zip(made.first_samples(), made.pipelines, strict=True):
        for offset, size in pipeline.micro_batches.offsets():
            part = values[first + offset : first + offset + size]
            weighted += sum(part) / len(part) * Fraction(size, made.global_batch_size)
    assert weighted == sum(values) / samples


@given(st.lists(st.integers(1, 9), min_size=1, max_size=4), st.integers(1, 80))
def test_trap_4_batch_statistics_get_one_number_of_micro_batches(speeds: list[int], samples: int) -> None:
    model, machines = graph(2, batch_statistics=True, places=(2,)), cluster(len(speeds))
    measured = profile(model, machines, [linear(1 / s) for s in speeds])
    planned = plan(model, machines, measured, global_batch_size=samples, micro_batch_sizes=(1, 2, 4), strategy="data")
    counts = {len(c.pipelines[0].micro_batches) for c in (x.plan for x in planned.candidates) if c is not None}
    assert len(counts) == 1  # all that was weighed computes the same statistics
    assert counts == {-(-samples // (4 * len(speeds)))} or samples < len(speeds)
    for candidate in planned.candidates:
        if candidate.plan is not None:
            assert {len(p.micro_batches) for p in candidate.plan.pipelines} == counts
            assert all(max(p.micro_batches.sizes) <= 4 for p in candidate.plan.pipelines)
        else:
            told = ("micro-batches", "the devices take", "takes at least")
            assert any(words in candidate.why_not for words in told)

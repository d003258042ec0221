"""Time curves of a model: the sum of its blocks, scaled to the whole where that was measured."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from heterodyne.cluster import BlockSample, DeviceProfile
from heterodyne.cost.compute import Compute, compute_of
from heterodyne.errors import MeasureError
from pure.build import device_profile, graph, linear

MODEL = graph(4)
PROFILE = device_profile(MODEL, linear(0.6, 0.06))


def with_whole(profile: DeviceProfile, *samples: tuple[int, float, float]) -> DeviceProfile:
    whole = tuple(
        BlockSample(micro_batch_size=b, forward_s=f, backward_s=w, spread=0.0, saved_bytes=0) for b, f, w in samples
    )
    return replace(profile, blocks={**profile.blocks, "*": whole})


@given(st.integers(1, 32))
def test_the_model_is_the_sum_of_its_blocks(size: int) -> None:
    compute = compute_of(MODEL, "d", PROFILE)
    assert compute.micro_batch_s(size) == pytest.approx(0.6 * size + 0.06)
    assert compute.forward.total(size) * 2 == pytest.approx(compute.backward.total(size))
    assert compute.micro_batch_s(0) == 0


def test_the_whole_wins_where_it_was_measured_and_scales_the_rest() -> None:
    # The sum of blocks says 0.22 and 0.44 for 1 sample, 0.42 and 0.84 for 2, 1.62 and 3.24 for 8.
    compute = compute_of(MODEL, "d", with_whole(PROFILE, (1, 0.22 * 0.9, 0.44 * 1.2), (2, 0.42 * 0.8, 0.84 * 1.1)))
    assert compute.forward.total(1) == pytest.approx(0.22 * 0.9)
    assert compute.backward.total(2) == pytest.approx(0.84 * 1.1)
    assert compute.forward.total(8) == pytest.approx(1.62 * 0.8)  # the ratio of the nearest size
    assert dict(compute.forward.composition) == pytest.approx({1: 0.9, 2: 0.8})


def ready_fractions(compute: Compute) -> list[float]:
    """Of the backward, after which the gradients of each block are complete."""
    whole = (0, len(MODEL.ops))
    return [compute.ready_fraction(block.start, whole, 4) for block in MODEL.blocks]


def test_gradients_of_the_first_block_are_complete_last() -> None:
    fractions = ready_fractions(compute_of(MODEL, "d", PROFILE))
    assert fractions == pytest.approx((1, 5 / 6, 4 / 6, 3 / 6, 2 / 6, 1 / 6))


def test_blocks_count_by_their_own_backward() -> None:
    head = tuple(replace(s, backward_s=s.backward_s * 5) for s in PROFILE.blocks["head"])
    compute = compute_of(MODEL, "d", replace(PROFILE, blocks={**PROFILE.blocks, "head": head}))
    assert ready_fractions(compute)[-1] == pytest.approx(0.5)


def test_a_kind_that_was_not_measured_is_named() -> None:
    blocks = {kind: samples for kind, samples in PROFILE.blocks.items() if kind != "layer"}
    with pytest.raises(MeasureError, match="d: block kinds layer were not measured"):
        compute_of(MODEL, "d", replace(PROFILE, blocks=blocks))


@given(st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1)), min_size=4, max_size=4))
def test_noise_never_makes_more_samples_take_less_time(times: list[tuple[float, float]]) -> None:
    samples = tuple(
        BlockSample(micro_batch_size=size, forward_s=f, backward_s=b, spread=0.1, saved_bytes=0)
        for size, (f, b) in zip((1, 2, 4, 8), times, strict=True)
    )
    noisy = replace(PROFILE, blocks=dict.fromkeys(MODEL.kinds, samples))
    compute = compute_of(MODEL, "d", with_whole(noisy, (2, 0.5, 0.5)))
    seconds = [compute.micro_batch_s(size) for size in range(12)]
    assert all(a <= b + 1e-12 for a, b in pairwise(seconds))

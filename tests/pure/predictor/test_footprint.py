"""Bytes against what can be counted by hand, or from the orders that schedules give."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from heterodyne.plan.schedules import SCHEDULES
from heterodyne.predictor.constants import constants
from heterodyne.predictor.footprint import footprint, layer_activation_bytes, usable_bytes
from heterodyne.predictor.setup import Setup
from heterodyne.predictor.software import Software
from heterodyne.predictor.transformer import Transformer

GPT = Transformer(layers=24, hidden=2048, heads=16, vocab=51200, seq=1024, ffn=8192)
EXPERTS = replace(GPT, experts=8, topk=2)
FRAGMENTS = constants().stated.fragments


def setup(**changes: object) -> Setup:
    return replace(Setup(global_batch=64, micro_batch=2), **changes)  # type: ignore[arg-type]


def most_under_way(schedule: str, places: int, chunks: int, micro_batches: int) -> float:
    """From the orders themselves: forwards whose backward has not been, of all chunks of a place, at most."""
    orders = SCHEDULES[schedule].orders(places, chunks, micro_batches)
    freed = {"F": 1, "B": -1, "I": -1}
    return max(max(accumulate(freed.get(action.kind, 0) for action in order), default=0) / chunks for order in orders)


@pytest.mark.parametrize("schedule", ["GPipe", "1F1B", "ZBH1", "ZBH2"])
@pytest.mark.parametrize("pp", [2, 4, 8])
def test_activations_are_of_the_micro_batches_under_way(schedule: str, pp: int) -> None:
    told = footprint(replace(GPT, vocab=1), setup(pp=pp, schedule=schedule))
    layer, _ = layer_activation_bytes(GPT, setup())
    assert told.activations == pytest.approx(GPT.layers / pp * layer * most_under_way(schedule, pp, 1, 32))


@pytest.mark.parametrize(("pp", "vpp"), [(2, 2), (2, 4), (4, 2), (4, 3)])
def test_interleaved_stages_have_more_under_way(pp: int, vpp: int) -> None:
    told = footprint(replace(GPT, vocab=1), setup(pp=pp, vpp=vpp, schedule="Interleaved1F1B"))
    layer, _ = layer_activation_bytes(GPT, setup())
    under_way = told.activations / (GPT.layers / pp * layer)
    assert under_way == pytest.approx(most_under_way("Interleaved1F1B", pp, vpp, 32))
    assert under_way == pytest.approx(pp + (pp - 1) / vpp)  # Korthikanti et al. (2022), section 4.2.3


@given(
    small=st.integers(1, 16), more=st.integers(1, 16), pp=st.sampled_from([1, 2, 4]), zero=st.integers(0, 3),
    recompute=st.sampled_from(["none", "selective", "full"]), flash=st.booleans(), combined=st.booleans(),
    model=st.sampled_from([GPT, EXPERTS, replace(GPT, dropout=True)]),
)  # fmt: skip
def test_larger_micro_batches_never_take_less(
    small: int, more: int, pp: int, zero: int, recompute: str, flash: bool, combined: bool, model: Transformer
) -> None:
    software = Software(flash=flash, combined=combined)
    few, many = (
        footprint(
            model,
            Setup(
                global_batch=128 * size, micro_batch=size, dp=4, pp=pp, zero=zero, software=software,
                recompute=recompute,  # type: ignore[arg-type]
            ),
        )
        for size in (small, small + more)
    )  # fmt: skip
    assert few.allocated < many.allocated
    assert few.total < many.total


def test_a_stage_that_keeps_its_output_has_it_for_each_micro_batch_under_way() -> None:
    freed, kept = (
        footprint(replace(GPT, vocab=1), setup(pp=4, recompute="full", software=Software(keeps_outputs=keeps)))
        for keeps in (False, True)
    )
    _, entering = layer_activation_bytes(GPT, setup())
    assert kept.activations - freed.activations == pytest.approx(4 * entering)


def test_combined_collectives_wait_for_all_gradients() -> None:
    one_by_one, combined = (
        footprint(GPT, setup(dp=8, zero=2, software=Software(combined=together))) for together in (False, True)
    )
    assert one_by_one.gradients == pytest.approx(4 * GPT.parameters / 8)
    assert combined.gradients == pytest.approx(4 * GPT.parameters)
    assert combined.states == pytest.approx(one_by_one.states)


def test_combined_gathers_have_all_parameters_at_a_time() -> None:
    told, without = (
        footprint(GPT, setup(dp=8, zero=zero, software=Software(combined=True, gradient_bytes=2))) for zero in (3, 2)
    )
    assert told.weights + told.workspace - without.workspace == pytest.approx(2 * GPT.parameters)


@given(ep=st.sampled_from([1, 2, 4, 8]))
def test_experts_that_have_no_copy_are_not_sharded_further(ep: int) -> None:
    told = footprint(EXPERTS, setup(dp=8, ep=ep, zero=1))
    of_experts = EXPERTS.layers * EXPERTS.experts * EXPERTS.ffn_parameters
    assert told.weights == pytest.approx(2 * (EXPERTS.parameters - of_experts + of_experts / ep), rel=1e-3)
    assert told.states == pytest.approx(12 * EXPERTS.parameters / 8, rel=1e-3)


def test_masks_of_dropouts_are_a_byte_each() -> None:
    plain, dropped = (layer_activation_bytes(replace(GPT, dropout=drop), setup())[0] for drop in (False, True))
    assert dropped - plain == pytest.approx(2 * 2 * GPT.seq * GPT.hidden)


def test_each_group_of_devices_has_buffers_of_its_own() -> None:
    alone, replicas, both = (footprint(GPT, setup(dp=dp, tp=tp)) for dp, tp in ((1, 1), (2, 1), (2, 2)))
    kept = [told.lost - FRAGMENTS * told.allocated for told in (alone, replicas, both)]
    assert kept[0] < kept[1] < kept[2]
    assert kept[1] - kept[0] == pytest.approx(2 * (kept[2] - kept[1]))  # all devices, and the replicas


@given(gib=st.integers(8, 192), dp=st.sampled_from([1, 2]), tp=st.sampled_from([1, 2]), pp=st.sampled_from([1, 4]))
def test_what_is_usable_leaves_room_for_what_is_lost(gib: int, dp: int, tp: int, pp: int) -> None:
    told = footprint(GPT, setup(dp=dp, tp=tp, pp=pp))
    left = gib * 2**30 - usable_bytes(gib * 2**30)
    scaled = told.lost - FRAGMENTS * told.allocated + FRAGMENTS * usable_bytes(gib * 2**30)
    assert scaled <= left + 1

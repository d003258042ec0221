"""What devices exchange in a step under different software, against what can be counted."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from heterodyne.cluster.catalog import lookup
from heterodyne.predictor.constants import constants
from heterodyne.predictor.devices import chip_of
from heterodyne.predictor.footprint import footprint
from heterodyne.predictor.kernels import head_kernels
from heterodyne.predictor.network import Network
from heterodyne.predictor.passes import Passes
from heterodyne.predictor.setup import Setup
from heterodyne.predictor.software import Software
from heterodyne.predictor.step import step_time
from heterodyne.predictor.transformer import Transformer

GPT = Transformer(layers=8, hidden=1024, heads=16, vocab=1024, seq=1024, ffn=4096)
EXPERTS = replace(GPT, experts=8, topk=2)
NETWORK = Network(
    devices=8, inside_bytes_per_s=100e9, between_bytes_per_s=50e9, inside_latency_s=0.0, between_latency_s=0.0
)
A_TOKEN = GPT.hidden * 2


def passes(model: Transformer, setup: Setup) -> Passes:
    chip = chip_of(lookup("A100-SXM-80GB"), "bf16", setup.software)
    return Passes(model=model, setup=setup, chip=chip, network=NETWORK, known=constants())


def plan(**changes: object) -> Setup:
    return replace(Setup(global_batch=64, micro_batch=1), **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize("tp", [2, 4, 8])
def test_neighbours_that_send_parts_send_all_of_it_once(tp: int) -> None:
    alone, whole, parts = (
        passes(GPT, plan(dp=8, pp=2, tp=own, software=Software(scatters_sends=scatters))).send_s
        for own, scatters in ((1, True), (tp, False), (tp, True))
    )
    # Eight devices share what a node has towards others, and each of the `tp` copies of what crosses is sent, or one of them.
    assert whole == pytest.approx(alone)
    gathered = NETWORK.gather_s(NETWORK.group(tp), GPT.seq * A_TOKEN)
    assert parts == pytest.approx(whole / tp + gathered)


@given(etp=st.sampled_from([1, 2, 4]), ep=st.sampled_from([1, 2, 4, 8]))
def test_devices_hold_the_experts_as_often_as_there_are_copies(etp: int, ep: int) -> None:
    setup = plan(dp=8, tp=4, ep=ep, etp=etp)
    _, routed = passes(EXPERTS, setup).layer_held(experts=True)
    devices = setup.dp * setup.tp
    assert devices * routed == pytest.approx(setup.expert_replicas * EXPERTS.experts * EXPERTS.ffn_parameters)


def test_neighbours_that_share_an_expert_gather_its_tokens() -> None:
    """Twice as many bytes of each token as it has experts; who has experts alone needs no all-reduce behind them."""
    shared, alone = (passes(EXPERTS, plan(dp=2, tp=4, ep=2, etp=etp)) for etp in (4, 1))
    tokens = GPT.seq * EXPERTS.topk * A_TOKEN
    gathers = 2 * NETWORK.gather_s(NETWORK.group(4), tokens)
    assert shared.exchanged_s(experts=True) - alone.exchanged_s(experts=True) == pytest.approx(gathers)


@given(copies=st.integers(1, 64), size=st.sampled_from([16, 32, 64]))
def test_tokens_that_are_sent_once_enter_each_node_at_most_once(copies: int, size: int) -> None:
    group = NETWORK.group(size)
    each, once = NETWORK.all_to_all_s(group, copies * 1e9), NETWORK.all_to_all_s(group, 1e9, copies)
    assert once <= each * (1 + 1e-9)
    most = (group.nodes - 1) * 1e9 * group.inside / NETWORK.between_bytes_per_s
    assert once <= max(most, 8e9 / NETWORK.inside_bytes_per_s) * (1 + 1e-9)


def test_parameters_that_are_kept_are_gathered_once_a_step() -> None:
    slow = replace(NETWORK, between_bytes_per_s=1e9)

    def extra_s(micro_batches: int, *, keeps: bool) -> float:
        software = Software(keeps_gathered=keeps)
        setup = plan(global_batch=8 * micro_batches, dp=8, tp=8, pp=2, software=software)
        chip = chip_of(lookup("A100-SXM-80GB"), "bf16", software)
        three, none = (step_time(GPT, replace(setup, zero=zero), chip, slow).step_s for zero in (3, 1))
        return three - none

    assert extra_s(4, keeps=True) == pytest.approx(extra_s(64, keeps=True), abs=1e-9)
    assert extra_s(64, keeps=False) > 10 * extra_s(4, keeps=False) > 0


def test_parameters_that_are_kept_take_room() -> None:
    kept, given_back, states_only = (
        footprint(GPT, plan(dp=8, pp=2, zero=zero, software=Software(keeps_gathered=keeps)))
        for zero, keeps in ((3, True), (3, False), (1, False))
    )
    assert (kept.weights, kept.gradients) == (states_only.weights, states_only.gradients)
    assert given_back.weights < kept.weights


def test_states_that_neighbours_share_stay_in_a_node() -> None:
    """All replicas hold a part of an eighth, so updated parameters cross NVLink only."""
    fast, slow = (replace(NETWORK, between_bytes_per_s=rate) for rate in (50e9, 1e9))
    setup = plan(dp=64, zero=1, shards=8, software=Software(overlap_gradients=False))
    chip = chip_of(lookup("A100-SXM-80GB"), "bf16", setup.software)
    waits = step_time(GPT, setup, chip, slow).exposed_s - step_time(GPT, setup, chip, fast).exposed_s
    reduced = [net.all_reduce_s(net.group(64), passes(GPT, setup).parameters * 4) for net in (slow, fast)]
    assert waits == pytest.approx(reduced[0] - reduced[1])
    assert footprint(GPT, setup).states == pytest.approx(8 * footprint(GPT, replace(setup, shards=0)).states)


def test_broadcasts_of_many_owners_wait_for_each_other() -> None:
    late = replace(NETWORK, between_latency_s=1e-5)
    for size in (16, 64, 256):
        group = late.group(size)
        waits = late.broadcasts_s(group, 1e9) - NETWORK.broadcasts_s(group, 1e9)
        assert waits == pytest.approx(size * (size // 8 - 1) * 1e-5)


def test_a_loss_in_place_moves_each_logit_three_times() -> None:
    moved = head_kernels(GPT, plan(software=Software(loss_in_place=True)), constants()).moved_bytes
    assert 3 * moved == pytest.approx(3 * 2 * GPT.seq * GPT.vocab)  # of the forward and twice as much of the backward

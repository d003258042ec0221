"""What the devices of a stage exchange inside a layer under different software, against what can be counted."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from heterodyne.cluster.catalog import lookup
from heterodyne.predictor.constants import constants
from heterodyne.predictor.devices import chip_of
from heterodyne.predictor.kernels import Product, head_kernels
from heterodyne.predictor.network import Network
from heterodyne.predictor.passes import Passes
from heterodyne.predictor.roofline import product_s
from heterodyne.predictor.setup import Setup
from heterodyne.predictor.software import Software
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


@given(etp=st.sampled_from([1, 2, 4]), ep=st.sampled_from([1, 2, 4, 8]))
def test_devices_that_share_experts_hold_all_of_them_once(etp: int, ep: int) -> None:
    _, routed = passes(EXPERTS, Setup(micro_batch=1, tp=4, ep=ep, etp=etp)).layer_held(experts=True)
    assert ep * etp * routed == pytest.approx(EXPERTS.experts * EXPERTS.ffn_parameters)


def test_neighbours_that_share_an_expert_gather_its_tokens() -> None:
    """Twice as many bytes of each token as it has experts; who has experts alone needs no all-reduce behind them."""
    shared, alone = (passes(EXPERTS, Setup(micro_batch=1, tp=4, ep=2, etp=etp)) for etp in (4, 1))
    tokens = GPT.seq * EXPERTS.topk * A_TOKEN
    gathers = 2 * NETWORK.gather_s(NETWORK.group(4), tokens)
    more = [a - b for a, b in zip(shared.exchanged_s(experts=True), alone.exchanged_s(experts=True), strict=True)]
    assert more == pytest.approx([gathers] * 2)


@given(copies=st.integers(1, 64), size=st.sampled_from([16, 32, 64]))
def test_tokens_that_are_sent_once_enter_each_node_at_most_once(copies: int, size: int) -> None:
    group = NETWORK.group(size)
    each, once = NETWORK.all_to_all_s(group, copies * 1e9), NETWORK.all_to_all_s(group, 1e9, copies)
    assert once <= each * (1 + 1e-9)
    most = (group.nodes - 1) * 1e9 * group.inside / NETWORK.between_bytes_per_s
    assert once <= max(most, 8e9 / NETWORK.inside_bytes_per_s) * (1 + 1e-9)


def test_a_loss_in_place_moves_each_logit_three_times() -> None:
    setup = Setup(micro_batch=1, software=Software(loss_in_place=True))
    moved = head_kernels(GPT, setup, constants()).moved_bytes
    assert 3 * moved == pytest.approx(3 * 2 * GPT.seq * GPT.vocab)  # of the forward and twice as much of the backward


def test_stopping_early_spares_the_last_product_of_a_layer() -> None:
    whole, early = (passes(GPT, Setup(micro_batch=64, software=Software(stops_early=stops))) for stops in (False, True))
    down = Product(m=64 * GPT.seq, n=GPT.hidden, k=GPT.ffn)
    assert whole.again_s(experts=False) == whole.layer_of(experts=False)[0]
    assert whole.again_s(experts=False) - early.again_s(experts=False) == pytest.approx(product_s(down, whole.chip))


def test_scores_that_are_written_out_can_be_made_again() -> None:
    plain, again = (
        passes(GPT, Setup(micro_batch=1, selective=selective, software=Software(flash=False))).layer_of(experts=False)
        for selective in (False, True)
    )
    assert again[0] == plain[0]
    assert again[1] - plain[1] == pytest.approx(constants().stated.selective * plain[0])


def test_of_tensor_parallel_traffic_shows_what_the_software_does_not_hide() -> None:
    def exchanged(hidden: tuple[float, float]) -> tuple[float, float]:
        setup = Setup(micro_batch=8, tp=4, software=Software(overlap_tensor=hidden))
        return passes(GPT, setup).exchanged_s(experts=False)

    shown, backward_hidden, all_hidden = (exchanged(hidden) for hidden in ((0.0, 0.0), (0.0, 0.5), (1.0, 1.0)))
    assert shown[0] == shown[1] > 0
    assert backward_hidden == (shown[0], shown[1] / 2)
    assert all_hidden == (0, 0)

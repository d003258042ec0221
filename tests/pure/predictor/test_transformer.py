"""Counts of parameters and operations against what is published of the models."""

from __future__ import annotations

import pytest

from heterodyne.predictor.transformer import Transformer

GPT3 = Transformer(layers=96, hidden=12288, heads=96, vocab=51200, seq=2048, ffn=4 * 12288)
LLAMA3 = Transformer(
    layers=32, hidden=4096, heads=32, kv_heads=8, vocab=128256, seq=8192, ffn=14336, gated=True, tied=False
)
MIXTRAL = Transformer(
    layers=32,
    hidden=4096,
    heads=32,
    kv_heads=8,
    vocab=32000,
    seq=4096,
    ffn=14336,
    gated=True,
    tied=False,
    experts=8,
    topk=2,
)


@pytest.mark.parametrize(("model", "billions"), [(GPT3, 174.6), (LLAMA3, 8.03), (MIXTRAL, 46.7)])
def test_parameters_are_those_that_are_published(model: Transformer, billions: float) -> None:
    assert model.parameters / 1e9 == pytest.approx(billions, rel=0.005)


@pytest.mark.tour("predictor/")
def test_a_forward_takes_two_operations_a_parameter_and_those_of_attention() -> None:
    weights = GPT3.parameters - GPT3.layers * 4 * GPT3.hidden
    scores = GPT3.layers * 4 * GPT3.seq * GPT3.hidden / 2
    assert GPT3.forward_flops_a_token() == pytest.approx(2 * weights + scores)


def test_only_the_experts_that_a_token_visits_compute() -> None:
    one = Transformer(layers=2, hidden=8, heads=2, vocab=16, seq=4, ffn=32, experts=4, topk=1)
    two = Transformer(layers=2, hidden=8, heads=2, vocab=16, seq=4, ffn=32, experts=4, topk=2)
    assert two.forward_flops_a_token() - one.forward_flops_a_token() == pytest.approx(2 * 2 * one.ffn_parameters)
    assert two.parameters == one.parameters


def test_experts_may_be_in_some_layers_only() -> None:
    every, second = (
        Transformer(layers=4, hidden=8, heads=2, vocab=16, seq=4, ffn=32, experts=4, moe_every=every)
        for every in (1, 2)
    )
    assert second.expert_layers == 2
    routed = 3 * every.ffn_parameters + every.shared_parameters
    assert every.parameters - second.parameters == pytest.approx(2 * routed)

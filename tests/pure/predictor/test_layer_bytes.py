"""Bytes of a layer against what can be counted by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from heterodyne.predictor.layer_bytes import gradients_under_way_bytes, layer_activation_bytes
from heterodyne.predictor.setup import Setup
from heterodyne.predictor.software import Software
from heterodyne.predictor.transformer import Transformer
from heterodyne.predictor.usable import needed_bytes, usable_bytes

GPT = Transformer(layers=24, hidden=2048, heads=16, vocab=51200, seq=1024, ffn=8192)
EXPERTS = replace(GPT, experts=8, topk=2)


@given(tp=st.sampled_from([1, 2, 4, 8]), seq=st.sampled_from([512, 2048]), micro_batch=st.integers(1, 8))
def test_activations_are_those_of_korthikanti(tp: int, seq: int, micro_batch: int) -> None:
    model = replace(GPT, seq=seq)
    setup = Setup(micro_batch=micro_batch, tp=tp, software=Software(flash=False))
    s, b, h, a = seq, micro_batch, model.hidden, model.heads
    assert layer_activation_bytes(model, setup)[0] == pytest.approx(s * b * h * (10 + 24 / tp + 5 * a * s / (h * tp)))
    beside = replace(setup, sequence_parallel=True)
    assert layer_activation_bytes(model, beside)[0] == pytest.approx(s * b * h / tp * (34 + 5 * a * s / h))
    selective = replace(beside, selective=True)
    assert layer_activation_bytes(model, selective)[0] == pytest.approx(34 * s * b * h / tp)


@given(
    small=st.integers(1, 16), more=st.integers(1, 16), selective=st.booleans(), flash=st.booleans(), experts=st.booleans(),
    model=st.sampled_from([EXPERTS, replace(EXPERTS, dropout=True)]),
)  # fmt: skip
def test_larger_micro_batches_never_take_less(
    small: int, more: int, selective: bool, flash: bool, experts: bool, model: Transformer
) -> None:
    few, many = (
        Setup(micro_batch=size, selective=selective, software=Software(flash=flash)) for size in (small, small + more)
    )
    for kept, other in zip(
        layer_activation_bytes(model, few, experts=experts),
        layer_activation_bytes(model, many, experts=experts),
        strict=True,
    ):
        assert kept < other
    under_way = [gradients_under_way_bytes(model, setup, experts=experts) for setup in (few, many)]
    assert under_way[0] < under_way[1]


def test_masks_of_dropouts_are_a_byte_each() -> None:
    plain, dropped = (
        layer_activation_bytes(replace(GPT, dropout=drop), Setup(micro_batch=2))[0] for drop in (False, True)
    )
    assert dropped - plain == pytest.approx(2 * 2 * GPT.seq * GPT.hidden)


@given(gib=st.integers(8, 192), backend=st.sampled_from(["cuda", "cpu"]))
def test_what_is_usable_is_what_is_not_lost(gib: int, backend: str) -> None:
    assert needed_bytes(usable_bytes(gib * 2**30, backend), backend) == pytest.approx(gib * 2**30, rel=1e-9)
    assert needed_bytes(0.0, "cpu") < needed_bytes(0.0, "cuda")

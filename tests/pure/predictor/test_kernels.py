"""Kernels compute what the model computes, however it is divided."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from heterodyne.predictor.constants import constants
from heterodyne.predictor.kernels import Kernels, Product, head_kernels, layer_kernels
from heterodyne.predictor.roofline import Chip, kernels_s, product_s
from heterodyne.predictor.setup import Setup
from heterodyne.predictor.software import Software
from heterodyne.predictor.transformer import Transformer

KNOWN = constants()
MODEL = Transformer(layers=4, hidden=512, heads=8, kv_heads=4, vocab=1000, seq=256, ffn=1536, gated=True)
CHIP = Chip(flops=100e12, wide_flops=100e12, units=64, memory_bytes_per_s=1e12, attention=(40e12, 50e12))
SIZES = st.integers(1, 20_000)


def flops(kernels: Kernels) -> float:
    return sum(p.flops for p in kernels.products) + sum(a.flops for a in kernels.attention)


def setup(**changes: object) -> Setup:
    return replace(Setup(micro_batch=2), **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize("flash", [True, False])
def test_a_layer_computes_its_part_of_the_model(flash: bool) -> None:
    made = layer_kernels(MODEL, setup(software=Software(flash=flash)), KNOWN)
    tokens = 2 * MODEL.seq
    model = MODEL if flash else replace(MODEL, causal=False)  # scores that are written out are all computed
    head = 2 * model.embedding_parameters
    assert flops(made) == pytest.approx(tokens * (model.forward_flops_a_token() - head) / model.layers)
    assert flops(head_kernels(MODEL, setup(), KNOWN)) == pytest.approx(tokens * head)


@given(tp=st.sampled_from([1, 2, 4]), cp=st.sampled_from([1, 2, 4]))
def test_devices_of_a_group_share_the_operations(tp: int, cp: int) -> None:
    whole = flops(layer_kernels(MODEL, setup(), KNOWN))
    assert tp * cp * flops(layer_kernels(MODEL, setup(tp=tp, cp=cp), KNOWN)) == pytest.approx(whole)


@given(ep=st.sampled_from([1, 2, 4, 8]))
def test_experts_compute_the_same_wherever_they_are(ep: int) -> None:
    model = replace(MODEL, experts=8, topk=2)
    whole = flops(layer_kernels(model, setup(), KNOWN, experts=True))
    assert flops(layer_kernels(model, setup(ep=ep), KNOWN, experts=True)) == pytest.approx(whole)


def test_a_backward_has_two_products_of_the_size_of_the_forward() -> None:
    product = Product(m=100, n=30, k=70, count=3)
    assert [half.flops for half in product.backward()] == [product.flops] * 2


@given(m=SIZES, n=SIZES, k=SIZES)
def test_no_product_is_faster_than_the_device_or_its_memory(m: int, n: int, k: int) -> None:
    product = Product(m=m, n=n, k=k)
    seconds = product_s(product, CHIP)
    assert seconds >= product.flops / CHIP.flops
    assert seconds >= product.elements * CHIP.element_bytes / CHIP.memory_bytes_per_s


def test_a_large_product_reaches_the_rate_of_the_device() -> None:
    product = Product(m=65536, n=16384, k=16384)
    assert product_s(product, CHIP) == pytest.approx(product.flops / CHIP.flops, rel=0.02)


@given(m=SIZES, n=SIZES, k=SIZES, more=st.integers(1, 2000))
def test_a_larger_product_never_takes_less(m: int, n: int, k: int, more: int) -> None:
    seconds = product_s(Product(m=m, n=n, k=k), CHIP)
    for larger in (Product(m=m + more, n=n, k=k), Product(m=m, n=n + more, k=k), Product(m=m, n=n, k=k + more)):
        assert product_s(larger, CHIP) >= seconds


@given(m=SIZES, n=SIZES, k=st.integers(64, 8192))
def test_of_two_products_the_one_with_longer_k_is_not_less_efficient(m: int, n: int, k: int) -> None:
    """The begin of a tile and the writing of its result are over after so many steps, whatever k is."""
    waits = replace(CHIP, written=1.0)
    short = Product(m=m, n=n, k=k)
    assert product_s(replace(short, k=2 * k), waits) <= 2 * product_s(short, waits)
    assert product_s(short, waits) >= product_s(short, CHIP)


def test_layers_of_alike_models_are_more_efficient_the_wider_they_are() -> None:
    def rate(hidden: int) -> float:
        model = replace(MODEL, hidden=hidden, heads=hidden // 128, kv_heads=None, ffn=4 * hidden, gated=False, seq=2048)
        made = layer_kernels(model, setup(tp=8, micro_batch=1), KNOWN)
        return flops(made) / kernels_s(made, replace(CHIP, written=0.5), launch=0.0)[0]

    rates = [rate(hidden) for hidden in (2048, 4096, 8192, 16384)]
    assert rates == sorted(rates)
    assert rates[-1] < CHIP.flops


def test_casting_to_8_bits_costs_what_it_moves_whatever_the_product_computes() -> None:
    made, a_byte = Kernels(products=(Product(m=4096, n=2048, k=1024),)), 1 / CHIP.memory_bytes_per_s
    forward, backward = kernels_s(made, CHIP)
    casting = kernels_s(made, replace(CHIP, cast_bytes=4.0))
    assert casting[0] - forward == pytest.approx(4 * 4096 * 1024 * a_byte)  # what flows in
    assert casting[1] - backward == pytest.approx(4 * 4096 * 2048 * a_byte)  # the gradient of what flows out
    assert kernels_s(made, replace(CHIP, flops=1.0, cast_bytes=4.0).wide) == (forward, backward)


@given(head=st.integers(1, 512))
def test_wider_heads_are_never_slower_and_fill_up_what_was_made_for_64(head: int) -> None:
    assert CHIP.attention_flops(head) <= CHIP.attention_flops(head + 1) <= CHIP.attention[1]
    assert CHIP.attention_flops(64) == CHIP.attention[0]
    assert CHIP.attention_flops(32) == CHIP.attention[0] / 2


def test_seconds_of_attention_scale_with_the_square_of_a_long_sequence() -> None:
    def seconds(seq: int) -> float:
        made = layer_kernels(replace(MODEL, seq=seq), setup(), KNOWN)
        return kernels_s(Kernels(attention=made.attention), CHIP)[0]

    assert seconds(2**18) == pytest.approx(4 * seconds(2**17), rel=0.01)
    assert seconds(1024) > seconds(2048) / 4  # short ones are over before the kernel is full


def test_a_host_that_cannot_start_kernels_fast_enough_is_what_counts() -> None:
    kernels = Kernels(products=(Product(m=1, n=1, k=1),), launches=20)
    slow = replace(CHIP, launch_s=1e-3)
    assert kernels_s(kernels, slow)[0] == pytest.approx(20e-3)
    assert kernels_s(kernels, slow, launch=0.0)[0] < 1e-3

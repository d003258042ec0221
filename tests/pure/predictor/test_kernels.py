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
CHIP = Chip(flops=100e12, units=64, memory_bytes_per_s=1e12, attention=(50e12, 40e12))
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


def test_a_host_that_cannot_start_kernels_fast_enough_is_what_counts() -> None:
    kernels = Kernels(products=(Product(m=1, n=1, k=1),), launches=20)
    slow = replace(CHIP, launch_s=1e-3)
    assert kernels_s(kernels, slow)[0] == pytest.approx(20e-3)
    assert kernels_s(kernels, slow, launch=0.0)[0] < 1e-3

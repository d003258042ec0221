"""What devices do at a precision under some software, from their datasheets."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from heterodyne.cluster.catalog import Accelerator, lookup
from heterodyne.errors import ClusterError
from heterodyne.predictor.constants import constants
from heterodyne.predictor.devices import chip_of, network_of
from heterodyne.predictor.kernels import Attention, Kernels
from heterodyne.predictor.roofline import kernels_s
from heterodyne.predictor.software import Software, is_known, software_of

A100 = lookup("A100-SXM-80GB")


def test_a_precision_that_a_device_lacks_is_done_in_a_wider_one() -> None:
    v100 = lookup("V100-SXM2-16GB")
    assert chip_of(v100, "fp8", Software()).flops == chip_of(v100, "fp16", Software()).flops
    assert chip_of(v100, "tf32", Software()).flops <= 15.7e12
    # Who computes in bf16 only has fp32 rates where there are no units for it, and the same as anybody where there are.
    only = Software(fp16=False)
    assert chip_of(v100, "bf16", only).flops <= 15.7e12 < chip_of(v100, "bf16", Software()).flops
    assert chip_of(A100, "bf16", only) == chip_of(A100, "bf16", Software())
    assert (
        chip_of(lookup("H100-SXM-80GB"), "fp8", Software()).flops
        > chip_of(lookup("H100-SXM-80GB"), "bf16", Software()).flops
    )


def test_software_is_known_by_name() -> None:
    assert not software_of("DeepSpeed ZeRO-3").flash
    assert software_of("Megatron Core MoE DeepEP").tuned
    assert software_of("something of our own") == software_of(None) == Software()
    assert is_known("DeepSpeed ZeRO-3")
    assert not is_known("something of our own")
    # Traffic of tensor parallelism hides behind the weights' gradients since 2022, and with pieces of products where it is asked for.
    hidden = [software_of(name).overlap_tensor for name in ("Megatron-LM 2021", "Megatron-LM 2022", "NeMo")]
    assert hidden == sorted(hidden)


def test_a_scale_for_each_row_makes_products_in_8_bits_slower_and_no_others() -> None:
    h100 = lookup("H100-SXM-80GB")
    row, tensor = (chip_of(h100, "fp8", Software(rowwise=rowwise)) for rowwise in (True, False))
    assert row.flops < tensor.flops
    assert row.wide == tensor.wide
    assert chip_of(h100, "bf16", Software(rowwise=True)) == chip_of(h100, "bf16", Software())


def test_a_device_whose_datasheet_is_silent_is_refused_with_the_remedy() -> None:
    bare = Accelerator(
        kind="X1", backend="cuda", aliases=(), peak_flops={}, measured_flops={}, memory_bytes=None,
        memory_bandwidth_bytes_per_s=None, link_bandwidth_bytes_per_s=None, link_type=None, tdp_w=None, prices=(),
        sources=(), notes="",
    )  # fmt: skip
    with pytest.raises(ClusterError, match=r"memory bandwidth of X1 .* 'kinds'"):
        chip_of(bare, "bf16", Software())
    with pytest.raises(ClusterError, match=r"peak of X1 in bf16 .* 'kinds'"):
        chip_of(replace(bare, memory_bandwidth_bytes_per_s=1e12), "bf16", Software())


def test_a_link_that_is_no_pcie_and_has_no_number_is_refused_and_not_assumed() -> None:
    fabric = replace(A100, link_bandwidth_bytes_per_s=None, link_type="fabric")
    with pytest.raises(ClusterError, match=r"bandwidth of fabric between the A100-SXM-80GB .* 'link_bandwidth'"):
        network_of(fabric, 8)
    assert network_of(fabric, 1).devices == 1  # there is no such link to use
    assert network_of(fabric, 8, inside_bytes_per_s=300e9) == network_of(A100, 8)


@given(seq=st.integers(1, 10**6), causal=st.booleans())
def test_a_flash_kernel_does_half_of_its_rate_at_a_length_that_is_told(seq: int, causal: bool) -> None:
    chip = replace(chip_of(A100, "bf16", Software()), memory_bytes_per_s=1e30, launch_s=0.0)
    one = Kernels(attention=(Attention(flops=1e12, bytes=1.0, seq=seq, causal=causal),))
    long = Kernels(attention=(Attention(flops=1e12, bytes=1.0),))
    slower = [a / b for a, b in zip(kernels_s(one, chip), kernels_s(long, chip), strict=True)]
    assert slower == pytest.approx([1 + constants().stated.attention_half[causal] / seq] * 2)


def test_attention_is_as_fast_as_the_kernel_that_the_software_has() -> None:
    """Kernels made for Ampere do a smaller part of a later device's peak (Dao, 2023; Shah et al., 2024)."""
    part = {
        (kind, kernel): chip_of(lookup(kind), "bf16", Software(attention=kernel)).attention[1]
        / lookup(kind).peak_flops["bf16"]
        for kind in ("A100-SXM-80GB", "H100-SXM-80GB", "B200")
        for kernel in ("flash1", "flash2", "cudnn")
    }
    for kind in ("A100-SXM-80GB", "H100-SXM-80GB", "B200"):
        assert part[kind, "flash1"] < part[kind, "flash2"] <= part[kind, "cudnn"] < 1
    assert part["A100-SXM-80GB", "flash2"] > part["H100-SXM-80GB", "flash2"] > part["B200", "flash2"]


def test_8_bits_gain_less_than_their_peak() -> None:
    """Softmax, norms and casts stay; so does the head (`Passes.head`)."""
    h100 = lookup("H100-SXM-80GB")
    eight, sixteen = chip_of(h100, "fp8", Software()), chip_of(h100, "bf16", Software())
    assert sixteen.flops < eight.flops < 2 * sixteen.flops
    assert eight.wide == replace(sixteen, element_bytes=eight.element_bytes)
    assert eight.attention == sixteen.attention

"""What devices do at a precision under some software, from their datasheets."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from heterodyne.cluster.catalog import Accelerator, lookup
from heterodyne.errors import ClusterError
from heterodyne.predictor.devices import chip_of
from heterodyne.predictor.kernels import Attention, Kernels
from heterodyne.predictor.roofline import kernels_s
from heterodyne.predictor.software import Software, software_of

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


@given(seq=st.integers(1, 10**6))
def test_a_flash_kernel_does_half_of_its_rate_at_a_length_that_is_told(seq: int) -> None:
    chip = replace(chip_of(A100, "bf16", Software()), attention_half=500.0, memory_bytes_per_s=1e30, launch_s=0.0)
    one = Kernels(attention=(Attention(flops=1e12, bytes=1.0, seq=seq),))
    long = Kernels(attention=(Attention(flops=1e12, bytes=1.0),))
    slower = [a / b for a, b in zip(kernels_s(one, chip), kernels_s(long, chip), strict=True)]
    assert slower == pytest.approx([1 + 500 / seq] * 2)

"""Equal runs, bit for bit, and products in the precision that was asked for."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

__all__ = ["exact_arithmetic"]

_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"


@contextmanager
def exact_arithmetic(device: torch.device, *, deterministic: bool = True, tf32: bool = False) -> Iterator[None]:
    """Settings of PyTorch for training on a device, put back at the end. They hold for the whole process.

    On CPU sums have one order as long as the number of threads stays the same. Collectives add in one order as long as the ranks and
    the sizes stay the same.

    Args:
        deterministic: an accelerator computes the same bits in each run: kernels are chosen that add in one order (PyTorch warns where
            it has none), and cuDNN does not try which is fastest. Enter this before the first kernel: cuBLAS looks then.
        tf32: products of fp32 matrices may be rounded to TF32 (10 bits of mantissa) where a device has units for it. Off, devices with
            and without such units compute the same; PyTorch leaves it on for convolutions.
    """
    deterministic = deterministic and device.type != "cpu"
    cudnn = torch.backends.cudnn
    before = (
        cudnn.benchmark,
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        os.environ.get(_WORKSPACE),
    )
    with _products(tf32=tf32):
        if deterministic:
            os.environ.setdefault(_WORKSPACE, ":4096:8")
            cudnn.benchmark = False
            torch.use_deterministic_algorithms(True, warn_only=True)
        try:
            yield
        finally:
            cudnn.benchmark, enabled, warn_only, workspace = before
            torch.use_deterministic_algorithms(enabled, warn_only=warn_only)
            if workspace is None:
                os.environ.pop(_WORKSPACE, None)


@contextmanager
def _products(*, tf32: bool) -> Iterator[None]:
    """Set the precision of products of fp32 by the switches that the script uses: PyTorch has two sets of them, and raises RuntimeError for
    who reads the older ones once the newer ones (``fp32_precision``) were set.
    """
    backends: Any = torch.backends
    try:
        matmul, convolutions = torch.get_float32_matmul_precision(), backends.cudnn.allow_tf32
    except RuntimeError:
        places = (backends.cuda.matmul, backends.cudnn.conv, backends.cudnn.rnn)
        before = [(place, place.fp32_precision) for place in places]
        for place in places:
            place.fp32_precision = "tf32" if tf32 else "ieee"
        try:
            yield
        finally:
            for place, precision in before:
                place.fp32_precision = precision
        return
    torch.set_float32_matmul_precision("high" if tf32 else "highest")
    backends.cudnn.allow_tf32 = tf32
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(matmul)
        backends.cudnn.allow_tf32 = convolutions

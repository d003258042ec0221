"""Equal runs, bit for bit."""

from __future__ import annotations

import os

import torch

__all__ = ["make_deterministic"]


def make_deterministic(device: torch.device) -> None:
    """Let this process compute the same bits in each run on the same machines. For the whole process, before its first kernel.

    On CPU nothing has to be done: with the same number of threads PyTorch's sums have one order. On an accelerator kernels are
    chosen that add in one order (PyTorch warns where it has none), and cuDNN is not to try which is fastest. Collectives add in one
    order as long as the ranks and the sizes stay the same.
    """
    if device.type == "cpu":
        return
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.backends.cudnn.benchmark = False
    torch.use_deterministic_algorithms(True, warn_only=True)

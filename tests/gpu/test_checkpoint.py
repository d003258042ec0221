"""Checkpoints of what lives on an accelerator."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from heterodyne.runtime.checkpoint.checkpoints import Checkpoints
from heterodyne.runtime.checkpoint.random_state import restore_random_state
from heterodyne.runtime.records.peak_memory import peak_memory_bytes

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine"),
]


def test_tensors_and_the_generator_of_a_device_come_back_bit_for_bit(tmp_path: Path) -> None:
    torch.cuda.manual_seed(3)
    weights = torch.randn(1000, device="cuda")
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, {"weights": weights, "half": weights.bfloat16()}, identity={}, plan="{}")
    drawn = torch.randn(10, device="cuda")
    found = checkpoints.latest()
    assert found is not None
    restored = checkpoints.load(found, identity={})
    assert torch.equal(restored.state["weights"].cuda(), weights)
    assert torch.equal(restored.state["half"].cuda(), weights.bfloat16())
    assert restored.random is not None
    restore_random_state(restored.random)
    assert torch.equal(torch.randn(10, device="cuda"), drawn)


def test_the_memory_of_a_device_is_that_of_its_allocator() -> None:
    ballast = torch.zeros(10_000_000, device="cuda")
    assert peak_memory_bytes(ballast.device) >= ballast.numel() * 4

"""Settings of the process that training changes are those of before when it ends."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from typing import Any

import pytest
import torch

from heterodyne.runtime.exact.determinism import exact_arithmetic

ACCELERATOR = torch.device("meta")  # any that is no CPU: nothing is computed


def settings() -> tuple[Any, ...]:
    cudnn = torch.backends.cudnn
    return (
        torch.get_float32_matmul_precision(),
        cudnn.allow_tf32,
        cudnn.benchmark,
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        os.environ.get("CUBLAS_WORKSPACE_CONFIG"),
    )


@pytest.mark.parametrize("matmul", ["highest", "medium"])
@pytest.mark.parametrize("options", [{}, {"tf32": True}, {"deterministic": False}])
def test_settings_are_put_back(matmul: Any, options: dict[str, bool]) -> None:
    first = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(matmul)
    try:
        before = settings()
        with contextlib.suppress(KeyError), exact_arithmetic(ACCELERATOR, **options):
            expected = "high" if "tf32" in options else "highest"
            assert torch.get_float32_matmul_precision() == expected
            assert torch.backends.cudnn.allow_tf32 == ("tf32" in options)
            assert torch.are_deterministic_algorithms_enabled() == ("deterministic" not in options)
            raise KeyError
        assert settings() == before
    finally:
        torch.set_float32_matmul_precision(first)


NEW_SWITCHES = """
import torch
from heterodyne.runtime.exact.determinism import exact_arithmetic

backends = torch.backends
places = (backends.cuda.matmul, backends.cudnn.conv, backends.cudnn.rnn)
{switch}.fp32_precision = "{precision}"
before = [place.fp32_precision for place in places]
for tf32 in (False, True):
    with exact_arithmetic(torch.device("cpu"), tf32=tf32):
        found = {{place.fp32_precision.replace("none", "ieee") for place in places}}
        assert found == {{"tf32" if tf32 else "ieee"}}
    assert [place.fp32_precision for place in places] == before
"""


@pytest.mark.parametrize("switch", ["backends", "backends.cuda.matmul"])
@pytest.mark.parametrize("precision", ["ieee", "tf32"])
def test_a_script_may_use_the_newer_switches_for_tf32(switch: str, precision: str) -> None:
    """In a process of its own: they cannot be taken back."""
    script = NEW_SWITCHES.format(switch=switch, precision=precision)
    subprocess.run([sys.executable, "-c", script], check=True)


def test_on_cpu_products_are_those_of_fp32_and_algorithms_stay() -> None:
    before = settings()
    with exact_arithmetic(torch.device("cpu")):
        assert torch.get_float32_matmul_precision() == "highest"
        assert not torch.are_deterministic_algorithms_enabled()
    assert settings() == before

"""Which precision each kind of device takes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from heterodyne.api.precision import resolved

Devices = tuple[tuple[str, str, bool], ...]
NEW, OLD, HOST = ("A100", "cuda", True), ("V100", "cuda", False), ("cpu", "cpu", False)


def session_of(devices: Devices, said: list[str]) -> Any:
    """``devices``: kind, backend, and whether it has units for bf16."""
    return SimpleNamespace(
        device=torch.device("cpu"),
        cluster=SimpleNamespace(devices=[SimpleNamespace(kind=kind, backend=backend) for kind, backend, _ in devices]),
        communicator=SimpleNamespace(all_gather_object=lambda _: [units for _, _, units in devices]),
        say=said.append,
    )


@pytest.mark.parametrize(
    ("devices", "expected"),
    [
        ((NEW, NEW), "bf16"),
        ((OLD,), "fp16"),
        ((HOST, HOST), "fp32"),
        ((NEW, OLD, HOST), {"A100": "bf16", "V100": "fp16", "cpu": "fp32"}),
    ],
)
def test_auto_is_what_each_kind_has_units_for_and_says_so(devices: Devices, expected: Any) -> None:
    said: list[str] = []
    assert resolved(session_of(devices, said), "auto") == expected
    assert len(said) == 1
    assert said[0].startswith("precision auto: ")


def test_bf16_without_units_is_told_with_what_auto_would_do() -> None:
    said: list[str] = []
    assert resolved(session_of((NEW, OLD, OLD), said), "bf16") == "bf16"
    assert len(said) == 1
    assert said[0].startswith("V100 has no units for bf16")
    assert "fp16 and a scaled loss" in said[0]


@pytest.mark.parametrize("asked", ["fp32", "fp16"])
def test_what_all_can_is_taken_as_it_is(asked: Any) -> None:
    said: list[str] = []
    assert resolved(session_of((NEW, OLD), said), asked) == asked
    assert said == []

"""Which devices talk to each other by their own backend."""

from __future__ import annotations

import pytest

from heterodyne.runtime.comm.communicator import platform_of


@pytest.mark.tour("runtime/comm/")
def test_devices_of_two_makers_that_torch_calls_by_one_type_are_told_apart() -> None:
    """NCCL and RCCL would wait for each other for ever."""
    assert platform_of("cuda", None) == "cuda" != platform_of("cuda", "6.4")
    assert platform_of("cpu", "6.4") == platform_of("cpu", None) == "cpu"

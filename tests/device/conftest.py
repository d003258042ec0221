"""Tests whose workers have accelerators; skipped, and said so, where these cannot be built."""

from __future__ import annotations

import pytest

from device.accelerator import built, unavailable


@pytest.fixture(scope="session", autouse=True)
def accelerator() -> None:
    """Built before the first job, which has less time."""
    why = unavailable()
    if why is not None:
        pytest.skip(why)
    built()

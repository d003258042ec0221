"""Captures that several tests look at, made once."""

from __future__ import annotations

from functools import cache

import pytest

from frontend.tiny_models import CASES, build
from heterodyne.frontend import Captured, trace


@cache
def captured_case(name: str) -> Captured:
    model, batch = build(name)
    return trace(model, batch)


@pytest.fixture(params=sorted(CASES))
def case(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def captured(case: str) -> Captured:
    return captured_case(case)

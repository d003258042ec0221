"""Tests that ask for ``captured`` run for each of the small models."""

from __future__ import annotations

import pytest

from frontend.captured_models import captured_case
from frontend.tiny_models import CASES
from heterodyne.frontend import Captured


@pytest.fixture(params=sorted(CASES))
def case(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def captured(case: str) -> Captured:
    return captured_case(case)

"""Everything here needs an accelerator that torch can use; without one it is skipped, and the reason said."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from multiprocess.conftest import pool

__all__ = ["pool"]

REASON = "torch finds no CUDA device here, so what is particular to one is not checked"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.gpu)
            if not torch.cuda.is_available():
                item.add_marker(pytest.mark.skip(reason=REASON))

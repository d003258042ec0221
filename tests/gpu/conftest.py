"""Everything here needs an accelerator that torch can use; without one it is skipped, and the reason said."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from multiprocess.pool import Pool

REASON = "torch finds no CUDA device here, so what is particular to one is not checked"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.gpu)
            if not torch.cuda.is_available():
                item.add_marker(pytest.mark.skip(reason=REASON))


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Workers of a template that captures nothing: what asks for a device before a fork takes it from the children."""
    pool = Pool()
    yield pool
    pool.close()

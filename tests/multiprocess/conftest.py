"""One pool of worker processes for the whole session."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from multiprocess.pool import Pool


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """``pool.run(world_size, function, *args)``; see `multiprocess.pool`."""
    pool = Pool()
    yield pool
    pool.close()

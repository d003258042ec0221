"""One pool of worker processes for the whole session; what tests capture in it is captured once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from heterodyne.graph.ir import ModelGraph
from multiprocess.models import makers
from multiprocess.pool import Pool, Shared
from multiprocess.work import program_of


def _graphs(arguments: Sequence[Any]) -> set[str]:
    """Jobs on a graph of ours cut stages out of its capture."""
    return {argument.name for argument in arguments if isinstance(argument, ModelGraph)} & set(makers())


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """``pool.run(world_size, function, *args)``; see `multiprocess.pool`."""
    pool = Pool(Shared(names=_graphs, make=program_of))
    yield pool
    pool.close()

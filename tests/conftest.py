"""Random cases are the same in each run and on each machine; `make fuzz` draws new ones, and says how to draw them again.

Random tests have no deadline: how long one takes says something about the machine, nothing about the code.

Tensors here are tiny, and threads would only wait for each other: each process has one, those that tests start too.
"""

from __future__ import annotations

import gc
import os
import random
import re
import sys
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.internal.conjecture import providers

FUZZ = "fuzz"
IN_WORKERS = "tests/multiprocess/"

os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when torch is loaded

settings.register_profile(
    "heterodyne", deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True, database=None
)
settings.register_profile(FUZZ, settings.get_profile("heterodyne"), derandomize=False)
settings.load_profile("heterodyne")

# Hypothesis also draws numbers that it finds in the modules loaded so far, so cases would depend on which tests ran before.
providers._get_local_constants = providers.Constants


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Tests of a group run in one process, so that what they capture is captured once.

    A group is a file; of the tests in worker processes, those of one model in all files: models are parameters, and stand in the names of
    tests. (The marks of ``--dist loadgroup`` are not seen by pytest-xdist 3.8 under pytest 9.2.)
    """
    from xdist.scheduler import LoadScopeScheduling

    from multiprocess.models import makers

    models = set(makers())

    class ByGroup(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            named = models.intersection(re.split(r"[-\[\]]", nodeid)) if file.startswith(IN_WORKERS) else ()
            return min(named, default=file)

    return ByGroup(config, log)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Undo what a test changes in the environment, where Lightning writes ranks that a later test would take for its own."""
    with mock.patch.dict(os.environ):
        return (yield)


@pytest.fixture(scope="module", autouse=True)
def frozen_heap() -> None:
    """The garbage collector looks only at what the tests of a file make.

    torch and Transformers make half a million objects that stay. Training and measuring each begin with a full collection, which
    takes most of the time of their small tests if it visits all of them.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def pool() -> Iterator[Any]:
    """The worker processes of all tests; see `multiprocess.pool`."""
    from multiprocess.session_pool import session_pool

    with session_pool() as made:
        yield made


def pytest_unconfigure() -> None:
    """The process ends: a last search for garbage in all that torch has made takes seconds."""
    gc.freeze()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that think come last: they are short and take no second process, so that all groups end at about the same time."""
    items.sort(key=lambda item: item.nodeid.startswith("tests/pure/"))


def pytest_runtest_setup(item: pytest.Item) -> None:
    """What a test draws by itself does not depend on those before it."""
    random.seed(0)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(0)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """A line for each failure with new cases: the command that draws the same."""
    if config.getoption("--hypothesis-profile") != FUZZ:
        return
    seed = config.getoption("--hypothesis-seed")
    for report in (*terminalreporter.getreports("failed"), *terminalreporter.getreports("error")):
        again = f"-m pytest --hypothesis-profile={FUZZ} --hypothesis-seed={seed}"
        terminalreporter.write_line(f"replay: {sys.executable} {again} '{report.nodeid}'")

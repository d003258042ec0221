"""Loops as people write them, from their files: what they print on unequal shares is what one process prints."""

from __future__ import annotations

import contextlib
import io
import re
import runpy
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from multiprocess.pool import World

RECIPES = sorted((Path(__file__).parents[2] / "examples" / "recipes").glob("*.py"))


def printed(world: World, script: str, shares: list[str]) -> str:
    """Return what this rank prints. The pool has made its process group, unless it is alone."""
    with contextlib.ExitStack() as stack:
        if world.world_size == 1:
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
            stack.callback(dist.destroy_process_group)
        for name in ("init_process_group", "destroy_process_group"):
            stack.enter_context(mock.patch.object(dist, name))
        stack.enter_context(mock.patch.object(sys, "argv", [script, *shares]))
        said = stack.enter_context(contextlib.redirect_stdout(io.StringIO()))
        runpy.run_path(script, run_name="__main__")
    return said.getvalue()


def numbers(said: str) -> list[float]:
    return [float(found) for found in re.findall(r"-?\d+\.\d+", said)]


@pytest.mark.parametrize("script", RECIPES, ids=lambda script: script.stem)
@pytest.mark.filterwarnings("ignore")
def test_unequal_shares_print_what_one_process_does(pool: Any, script: Path) -> None:
    (alone,) = pool.run(1, printed, str(script), [])
    first, *others = pool.run(3, printed, str(script), ["5", "2", "1"])
    assert not any(others)
    assert len(numbers(alone)) >= 10
    assert re.sub(r"\d+\.\d+", "#", first) == re.sub(r"\d+\.\d+", "#", alone)
    assert numbers(first) == pytest.approx(numbers(alone), rel=1e-4, abs=1e-5)

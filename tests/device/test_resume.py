"""Checkpoints of accelerators, and training in bfloat16 on them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from device.test_exactness import CPU, A, B
from multiprocess.models import captured
from multiprocess.pool import Pool
from multiprocess.test_training_pipelines import ADAMW, chain, in_parts, take_over, train, whole


@pytest.mark.parametrize(("before", "after"), [(in_parts, chain), (whole, in_parts)])
def test_a_run_goes_on_from_a_checkpoint(pool: Pool, before: Any, after: Any, tmp_path: Path) -> None:
    graph = captured("gpt2")
    found = pool.run(4, take_over, graph, before(graph), after(graph), tmp_path, devices=(A, A, B, CPU))
    for undisturbed, resumed in found:
        assert resumed == pytest.approx(undisturbed, rel=1e-5)


@pytest.mark.parametrize("spread", [chain, in_parts])
def test_in_bfloat16_training_goes_nearly_the_same_way(pool: Pool, spread: Any) -> None:
    graph = captured("gpt2")
    exact, rounded = (
        pool.run(4, train, graph, spread(graph), 5, ADAMW, {"precision": precision}, devices=(A, A, A, CPU))[0][0]
        for precision in ("fp32", "bf16")
    )
    assert rounded != exact
    assert rounded == pytest.approx(exact, rel=1e-2)

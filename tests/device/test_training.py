"""Training with clipping, dropout and AdamW on accelerators goes where it goes on one CPU."""

from __future__ import annotations

import functools
from typing import Any

import pytest
from torch import Tensor

from device.test_exactness import CPU, A, B
from heterodyne.runtime.exact.verify import compare
from multiprocess.models import captured
from multiprocess.pool import Pool
from multiprocess.test_training_pipelines import STEPS, chain, in_parts, train, train_on_one_device, whole


@functools.cache
def on_one_device(spread: Any) -> tuple[list[float], list[float], dict[str, Tensor]]:
    graph = captured("gpt2")
    return train_on_one_device(graph, spread(graph))


@pytest.mark.parametrize("devices", [(A, A, A, A), (A, B, CPU, A)], ids="+".join)
@pytest.mark.parametrize("spread", [whole, chain, in_parts])
def test_twenty_steps_are_those_of_one_device(pool: Pool, spread: Any, devices: tuple[str, ...]) -> None:
    graph = captured("gpt2")
    expected_losses, expected_norms, expected = on_one_device(spread)
    for losses, norms, state in pool.run(4, train, graph, spread(graph), STEPS, devices=devices):
        assert losses[:5] == pytest.approx(expected_losses[:5], rel=1e-5)
        assert losses == pytest.approx(expected_losses, rel=1e-4)
        if None not in norms:  # an idle rank knows none
            assert norms == pytest.approx(expected_norms, rel=1e-3)
        assert compare(0.0, state, 0.0, expected).largest <= 1e-3

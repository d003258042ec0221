"""Where a device decides by the norm of the gradient whether to update, a step that is not finite updates nothing all the same."""

from __future__ import annotations

import math
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from device.test_exactness import CPU, A, B
from heterodyne.graph.ir import ModelGraph
from heterodyne.job import OptimizerSection
from multiprocess.models import build, captured
from multiprocess.pool import Pool, World
from multiprocess.test_training_pipelines import SAMPLES, Spread, chain, in_parts, whole
from multiprocess.work import copied, staged_worker

OVERFLOWS = (2, 3)
"""The steps whose gradient is not finite, counted from 0."""


def overflowing(world: World, graph: ModelGraph, spread: Spread) -> list[dict[str, Any]]:
    """Steps of AdamW, of which some have a gradient that overflows on one rank: who decided, what was told, and whether anything moved."""
    case = build(graph, SAMPLES)
    adamw = OptimizerSection(lr=1e-2, schedule="constant")
    worker = staged_worker(world, case, spread[1], spread[0], clip=0.5, optimizer=adamw, seed=5)
    matrices = [p for p in worker.module.parameters() if not p.is_meta and p.dim() == 2 and p.numel()]
    if world.rank == 1:
        matrices[0].register_hook(
            lambda gradient: (
                torch.full_like(gradient, math.inf) if gradient is not None and worker.steps_done in OVERFLOWS else None
            )
        )
    found = []
    with patch("heterodyne.runtime.weights.gradients.require_no_hooks"):
        for _ in range(6):
            before = state_of(worker)
            result = worker.step(case.batch)
            now = state_of(worker)
            same = before.keys() == now.keys() and all(torch.equal(now[name], before[name]) for name in now)
            found.append({"late": result.late is not None, "fault": result.fault, "same": same, "loss": result.loss})
    worker.close()
    return found


def state_of(worker: Any) -> dict[str, Tensor]:
    """What this rank has of the weights and of the optimizer's state, copied."""
    held = {name: p for name, p in worker.module.named_parameters() if not p.is_meta}
    state = {
        f"{place} {key}": value
        for place, entries in enumerate(worker.optimizer.state.values())
        for key, value in entries.items()
    }
    return copied({**held, **state})


@pytest.mark.parametrize("spread", [chain, in_parts])
def test_a_device_that_decides_leaves_everything_as_it_was(pool: Pool, spread: Any) -> None:
    graph = captured("gpt2")
    for steps in pool.run(4, overflowing, graph, spread(graph), devices=(A,) * 4):
        assert [step["same"] for step in steps] == [number in OVERFLOWS for number in range(6)]
        assert [step["late"] for step in steps] == [True, True, True, False, True, True], "the host looks after a fault"
        assert [step["fault"] is None for step in steps] == [number not in OVERFLOWS for number in range(6)]
        assert "norm of the gradient is not finite" in steps[2]["fault"]
        assert "is not finite (rank " in steps[3]["fault"], "the next one is looked for"
        assert all(math.isfinite(step["loss"]) for step in steps)


@pytest.mark.parametrize(
    ("spread", "devices"), [(chain, (A, B, CPU, A)), (whole, (A,) * 4)], ids=["several kinds of devices", "idle ranks"]
)
def test_the_host_decides_where_one_rank_would_not_know(pool: Pool, spread: Any, devices: tuple[str, ...]) -> None:
    graph = captured("gpt2")
    for steps in pool.run(4, overflowing, graph, spread(graph), devices=devices):
        assert not any(step["late"] for step in steps)
        assert [step["fault"] is None for step in steps] == [number not in OVERFLOWS for number in range(6)]
        assert all(step["same"] for number, step in enumerate(steps) if number in OVERFLOWS)

"""A step that is not finite anywhere is skipped everywhere, whatever the plan, and every rank says where it was."""

from __future__ import annotations

import math
from typing import Any
from unittest.mock import patch

import pytest
import torch

from heterodyne.graph.ir import ModelGraph
from heterodyne.job import OptimizerSection
from heterodyne.runtime.weights.between_steps import WeightWatch
from multiprocess.models import build, captured
from multiprocess.pool import Pool, World
from multiprocess.test_training_pipelines import SAMPLES, Spread, chain, cut, v_shape
from multiprocess.work import PipelineOf, StageOf, staged_worker

SGD = OptimizerSection(name="sgd", lr=1e-2, momentum=0.0, schedule="constant")


def data(graph: ModelGraph) -> Spread:
    return "1F1B", tuple(PipelineOf((size,), cut(graph, (), ((rank,),))) for rank, size in enumerate((4, 3, 2)))


def split(graph: ModelGraph) -> Spread:
    return "1F1B", (PipelineOf((5, 4), (StageOf(len(graph.ops), (0, 1, 2), (3, 2, 1), kind="split"),)),)


def exploding(world: World, graph: ModelGraph, spread: Spread, clip: float) -> list[tuple[float, str | None]]:
    """The first update throws the weights far away."""
    case = build(graph, SAMPLES)
    far = SGD.model_copy(update={"lr": 1e30})
    worker = staged_worker(world, case, spread[1], spread[0], clip=clip, optimizer=far, seed=5)
    results = [worker.step(case.batch) for _ in range(3)]
    worker.close()
    return [(r.loss, r.fault) for r in results]


def spoilt(world: World, graph: ModelGraph, spread: Spread, what: str) -> dict[str, Any]:
    """One step where the gradient of a weight on rank 1, or a weight itself, is not finite: what is said, and whether nothing moved."""
    case = build(graph, SAMPLES)
    worker = staged_worker(world, case, spread[1], spread[0], clip=0.5, optimizer=SGD, seed=5)
    here = {name: p for name, p in worker.module.named_parameters() if not p.is_meta}
    matrices = [p for p in here.values() if p.dim() == 2 and p.numel()]
    if what == "gradient" and world.rank == 1 and matrices:
        matrices[0].register_hook(lambda gradient: None if gradient is None else torch.full_like(gradient, math.inf))
    if what == "weight" and matrices:
        with torch.no_grad():
            matrices[0][0] = math.nan
    before = {name: p.detach().clone() for name, p in here.items()}
    # Nobody may do so, but a device may.
    with patch.object(WeightWatch, "require_as_left"), patch("heterodyne.runtime.weights.gradients.require_no_hooks"):
        result = worker.step(case.batch)
    worker.close()
    same = all(torch.equal(p.detach().nan_to_num(7.0), before[name].nan_to_num(7.0)) for name, p in here.items())
    return {"fault": result.fault, "same": same}


@pytest.mark.parametrize("clip", [0.0, 1e30])
@pytest.mark.parametrize("spread", [data, chain, v_shape, split], ids=lambda of: of.__name__)
def test_an_explosion_is_seen_at_the_next_step_by_all(pool: Pool, spread: Any, clip: float) -> None:
    graph = captured("gpt")
    told = pool.run(4, exploding, graph, spread(graph), clip)
    assert all(str(one) == str(told[0]) for one in told)
    first, *others = told[0]
    assert math.isfinite(first[0])
    assert first[1] is None
    for loss, fault in others:
        assert not math.isfinite(loss)
        assert fault is not None
        assert "block" in fault
        assert "e+" in fault, "the largest weight is shown"


@pytest.mark.parametrize(
    ("what", "words"),
    [("weight", "has values that are not finite (rank "), ("gradient", "is not finite (rank ")],
)
@pytest.mark.parametrize("spread", [data, chain, split], ids=lambda of: of.__name__)
def test_what_is_not_finite_is_named_and_nothing_moves(pool: Pool, spread: Any, what: str, words: str) -> None:
    graph = captured("gpt")
    told = pool.run(4, spoilt, graph, spread(graph), what)
    assert len({one["fault"] for one in told}) == 1
    assert all(one["same"] for one in told)
    assert words in told[0]["fault"]
    assert ", block " in told[0]["fault"]

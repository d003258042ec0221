"""Law 1 on accelerators that refuse what GPUs and NCCL refuse: of one vendor, of two, and beside CPUs."""

from __future__ import annotations

import pytest

from multiprocess.exactness import Replicas, Spread, require_exact
from multiprocess.models import captured
from multiprocess.pool import Pool
from multiprocess.work import PipelineOf, StageOf

A, B, CPU = "vendor_a", "vendor_b", "cpu"
FLEETS = ((A, A, A), (A, A, B), (A, B, CPU), (CPU, A, A))


@pytest.mark.parametrize("devices", FLEETS, ids="+".join)
@pytest.mark.parametrize("name", ["gpt", "mixed"])
def test_replicas(pool: Pool, name: str, devices: tuple[str, ...]) -> None:
    shares = ((2, 1), (4, 3), (1, 1))
    require_exact(pool, name, Replicas(shares, 2000), devices=devices)


@pytest.mark.parametrize("devices", FLEETS, ids="+".join)
def test_pipeline(pool: Pool, devices: tuple[str, ...]) -> None:
    ops = len(captured("gpt2").ops)
    stages = (StageOf(ops // 3, (0,), (1,), (0,)), StageOf(ops, (1, 2), (1, 2)))
    spread = Spread(3, "1F1B", (PipelineOf((3, 3, 2, 1), stages),))
    require_exact(pool, "gpt2", spread, devices=devices)


@pytest.mark.parametrize("devices", FLEETS, ids="+".join)
@pytest.mark.parametrize("kind", ["split", "context"])
def test_stage_in_parts(pool: Pool, kind: str, devices: tuple[str, ...]) -> None:
    stage = StageOf(len(captured("gpt").ops), (0, 1, 2), (2, 1, 1), kind=kind)
    require_exact(pool, "gpt", Spread(3, "1F1B", (PipelineOf((2, 3), (stage,)),)), devices=devices)


@pytest.mark.parametrize("name", ["contrastive", "terms", "mixtral", "resnet", "t5"])
def test_what_models_need(pool: Pool, name: str) -> None:
    """Losses in which samples see each other or whose terms have denominators of their own, experts, BatchNorm, two stacks."""
    ops = len(captured(name).ops)
    replicas = (PipelineOf((4,), (StageOf(ops, (0,), (1,)),)), PipelineOf((3,), (StageOf(ops, (1,), (1,)),)))
    cut = (PipelineOf((3, 2), (StageOf(ops // 2, (1,), (1,)), StageOf(ops, (0,), (1,)))),)
    split = (PipelineOf((2, 3), (StageOf(ops, (0, 1), (2, 1), kind="split"),)),)
    for pipelines in (replicas,) if name == "contrastive" else (replicas, cut, split):
        require_exact(pool, name, Spread(2, "ZBH1", pipelines), devices=(A, A))

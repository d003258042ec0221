"""Law 1 on CUDA, alone and in one job with CPU ranks (gloo between them, through pinned host memory)."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from heterodyne.graph.ir import ModelGraph
from heterodyne.job import OptimizerSection
from heterodyne.runtime.exact.dropout import SampleDropout
from heterodyne.runtime.records.recorder import Recorder
from multiprocess.exactness import Errors, Replicas, errors_of, require_exact
from multiprocess.models import NAMES, build, captured
from multiprocess.pool import Pool, World
from multiprocess.work import Shares, worker_of

ADAMW = OptimizerSection(lr=1e-2, eps=1e-3)


def errors_on(world: World, graph: ModelGraph, plan: Replicas, dtype: torch.dtype, alone_on: str) -> Errors:
    """The largest errors of one step under the plan against one device of type ``alone_on``."""
    _only_exact_products()
    return errors_of(world, graph, plan, dtype, alone_on)


def _only_exact_products() -> None:
    """This process computes for tests alone: no TF32, and the same order of sums in each run."""
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.deterministic = True


@pytest.mark.parametrize("name", NAMES)
def test_one_cuda_device_in_single_precision(pool: Pool, name: str) -> None:
    plan = Replicas(((3, 2, 2),), backends=("cuda",))
    require_exact(pool, name, plan, torch.float32, "cuda", job=errors_on, timeout_s=180)


@pytest.mark.parametrize("backends", [("cpu", "cuda"), ("cuda", "cpu", "cpu"), ("cuda", "cuda")], ids="+".join)
@pytest.mark.parametrize("name", ["gpt", "mixed"])
def test_unlike_devices_in_one_job_against_the_cpu_alone(pool: Pool, name: str, backends: tuple[str, ...]) -> None:
    plan = Replicas(((2, 1), (4, 1), (1, 1))[: len(backends)], backends=backends)
    require_exact(pool, name, plan, torch.float64, "cpu", job=errors_on, bar=1e-9, timeout_s=180)


def train(world: World, graph: ModelGraph, shares: Shares, backends: tuple[str, ...]) -> tuple[list[float], list[str]]:
    """Losses of some steps, and the actions that were recorded in the last."""
    _only_exact_products()
    case = build(graph, sum(sum(sizes or ()) for sizes in shares))
    recorder = Recorder(rank=world.rank, device=torch.device(backends[world.rank]), keep_steps=1)
    worker = worker_of(
        world, case, shares, optimizer=ADAMW, clip=0.5, bucket_bytes=2000, backends=backends, recorder=recorder
    )
    losses = [worker.step(case.batch).loss for _ in range(4)]
    worker.state.state_dict()
    assert all(event.seconds >= 0 for event in recorder.events())
    return losses, [event.name for event in recorder.events()]


@pytest.mark.parametrize("backends", [("cuda",), ("cpu", "cuda")], ids="+".join)
def test_training_repeats_and_is_recorded(pool: Pool, backends: tuple[str, ...]) -> None:
    shares = ((2, 2), (3, 1))[: len(backends)]
    first = pool.run(len(backends), train, captured("gpt2"), shares, backends, timeout_s=180)
    second = pool.run(len(backends), train, captured("gpt2"), shares, backends, timeout_s=180)
    assert first == second
    for losses, names in first:
        assert losses == first[0][0]
        assert losses[-1] < losses[0]
        assert {"0F0", "0B1", "0CLIP", "0STEP", *(["0REDUCE_GRAD0"] if len(backends) > 1 else [])} <= set(names)


def test_masks_are_those_of_the_cpu() -> None:
    masks = []
    for device in (torch.device("cpu"), torch.device("cuda")):
        mode = SampleDropout(seed=3, device=device)
        with mode.forward(mode.draws(1, [7, 8, 2**40])):
            masks.append(F.dropout(torch.ones(3, 5, 7, device=device), 0.4).cpu())
    assert torch.equal(*masks)


def test_bfloat16_trains() -> None:
    case = build(captured("llama"), 4)
    worker = worker_of(
        World(rank=0, world_size=1), case, ((2, 2),), backends=("cuda",), precision="bf16", optimizer=ADAMW, clip=1.0
    )
    losses = [worker.step(case.batch).loss for _ in range(5)]
    assert losses[-1] < losses[0]
    assert {p.grad.dtype for p in case.module.parameters()} == {torch.float32}

"""Parameters in 16 bits: fp32 gradients, fp32 master weights, and both in a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from heterodyne.frontend import trace
from heterodyne.job import OptimizerSection
from heterodyne.runtime.worker import Worker
from multiprocess.models import Case, TinyGPT
from multiprocess.pool import Pool, World
from multiprocess.work import PipelineOf, StageOf, copied, go_on, save, staged_worker

ADAMW = OptimizerSection(name="adamw", lr=1e-3, eps=1e-3, schedule="constant", weight_decay=0.0)
# For each plan the pipelines: sizes of micro-batches, and the rank of each stage.
REPLICAS = (((2, 1), (0,)), ((1, 1), (1,)))
PIPELINE = (((2, 2, 1), (0, 1)),)
SPLIT = (((3, 2), ((0, 1),)),)


class Linear(nn.Module):
    """Its gradient is the mean of the samples."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(3))

    def forward(self, points: Tensor) -> Tensor:
        return (points * self.weight).sum(1).mean()


def worker_of(world: World, module: nn.Module, batch: dict[str, Tensor], pipelines: Any, **more: Any) -> Worker:
    captured = trace(module, batch)
    ops = len(captured.graph.ops)
    made = []
    for sizes, ranks in pipelines:
        stages = []
        for number, home in enumerate(ranks):
            split = isinstance(home, tuple)
            stop = ops * (number + 1) // len(ranks)
            held = home if split else (home,)
            stages.append(StageOf(stop, held, (2, 1)[: len(held)], kind="split" if split else "replicate"))
        made.append(PipelineOf(sizes, tuple(stages)))
    case = Case(module=module, batch=batch, graph=captured.graph)
    return staged_worker(world, case, made, "1F1B", capture=captured, **more)


def sums(world: World, pipelines: Any) -> list[float]:
    module = Linear().bfloat16()
    batch = {"points": torch.tensor([512.0, 2.0]).repeat(3, 1).t().bfloat16()}
    worker = worker_of(world, module, batch, pipelines)
    gradient = worker.gradients(batch)[1]["weight"]
    worker.close()
    assert module.weight.grad_dtype is torch.bfloat16, "as the user's parameter was"
    return gradient.tolist()


@pytest.mark.parametrize("pipelines", [(((1, 1), (0,)),), (((1,), (0,)), ((1,), (1,)))], ids=["accumulated", "reduced"])
def test_256_and_1_is_257(pool: Pool, pipelines: Any) -> None:
    for found in pool.run(len(pipelines), sums, pipelines):
        assert found == [257.0] * 3


def narrow() -> tuple[nn.Module, dict[str, Tensor]]:
    torch.manual_seed(0)
    ids = torch.randint(0, 23, (5, 8))
    return TinyGPT().bfloat16(), {"input_ids": ids, "labels": ids.roll(-1, 1)}


def trained(world: World, pipelines: Any, folder: Path) -> tuple[list[float], list[float], dict[str, Tensor]]:
    """Losses undisturbed, those of another worker that goes on from the checkpoint in the middle, and what the model has become."""
    module, batch = narrow()
    worker = worker_of(world, module, batch, pipelines, optimizer=ADAMW, clip=1.0)
    losses = [worker.step(batch).loss for _ in range(3)]
    save(worker, folder)
    after = [worker.step(batch).loss for _ in range(3)]
    state = worker.state.state_dict()
    assert all(values["master"].dtype is torch.float32 for values in state["optimizer"].values())
    model = copied(state["model"])
    worker.close()
    other, _ = narrow()
    resumed = worker_of(world, other, batch, pipelines, optimizer=ADAMW, clip=1.0)
    go_on(resumed, folder)
    again = [resumed.step(batch).loss for _ in range(3)]
    assert again == after
    same = copied(resumed.state.state_dict()["model"])
    assert all(torch.equal(same[name], value) for name, value in model.items())
    resumed.close()
    return losses, after, model


def on_one_device() -> list[float]:
    """Masters by hand: micro-batches of one sample, gradients summed in fp32."""
    module, batch = narrow()
    masters = {n: nn.Parameter(p.detach().float()) for n, p in module.named_parameters()}
    optimizer = torch.optim.AdamW(masters.values(), lr=ADAMW.lr, betas=ADAMW.betas, eps=ADAMW.eps, weight_decay=0.0)
    losses = []
    for _ in range(6):
        total = 0.0
        for sample in range(5):
            loss = module(**{name: tensor[sample : sample + 1] for name, tensor in batch.items()})
            loss.backward()
            total += loss.item() / 5
            for name, parameter in module.named_parameters():
                if parameter.grad is None:
                    continue
                gradient = parameter.grad.float() / 5
                masters[name].grad = gradient if masters[name].grad is None else masters[name].grad + gradient
                parameter.grad = None
        torch.nn.utils.clip_grad_norm_(masters.values(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for name, parameter in module.named_parameters():
                parameter.copy_(masters[name])
        losses.append(total)
    return losses


@pytest.mark.parametrize("pipelines", [REPLICAS, PIPELINE, SPLIT], ids=["replicas", "pipeline", "split"])
def test_masters_go_where_those_of_one_device_go_and_on_from_a_checkpoint(
    pool: Pool, pipelines: Any, tmp_path: Path
) -> None:
    expected = on_one_device()
    for losses, after, _ in pool.run(2, trained, pipelines, tmp_path):
        assert [*losses, *after] == pytest.approx(expected, rel=5e-3)
        assert losses[0] - after[-1] > 0.05

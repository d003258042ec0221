"""Parameters that get a gradient in some steps only are trained as on one device, where an optimizer leaves out those without any."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from heterodyne.frontend import trace
from heterodyne.graph.ir import ModelGraph
from heterodyne.loss_count import LossCount
from heterodyne.plan.lower import lower
from heterodyne.runtime.comm.communicator import Communicator
from heterodyne.runtime.worker import Worker
from multiprocess.pool import Pool, World
from multiprocess.work import PipelineOf, StageOf, cluster_of, staged_plan

SAMPLES, STEPS, CLIP = 8, 7, 0.4
CPU = torch.device("cpu")


class Heads(nn.Module):
    """A head a task; whose turn it is, the loop says. Nobody reads ``never``."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Linear(4, 8)
        self.heads = nn.ModuleList(nn.Linear(8, 1) for _ in range(3))
        self.never = nn.Parameter(torch.ones(3))
        self.turn = 0

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        found: Tensor = self.heads[self.turn](torch.tanh(self.body(x)))
        return (found.squeeze(-1) - y).pow(2).mean()


def batch_of(step: int) -> dict[str, Tensor]:
    x = torch.randn(SAMPLES, 4, generator=torch.Generator().manual_seed(step))
    return {"x": x, "y": x.sum(1)}


def turn_of(step: int) -> int:
    return (0, 1, 0, 2, 2, 1, 0)[step]


@functools.cache
def capture() -> tuple[ModelGraph, LossCount]:
    found = trace(Heads(), batch_of(0), name="Heads")
    return found.graph, found.loss_count


def optimizer_of(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.05, weight_decay=0.3, eps=1e-3)


def stages(zero: int) -> list[PipelineOf]:
    ops, state = len(capture()[0].ops), (2, 1) if zero else None
    return [PipelineOf((4, 4), (StageOf(ops, (0, 1), (3, 1), state=state),))]


def trained(world: World, zero: int) -> tuple[list[float], dict[str, Tensor]]:
    model, cluster = Heads(), cluster_of(3)
    graph, count = capture()
    plan = staged_plan(graph, cluster, stages(zero), "1F1B", bucket_bytes=64, zero=zero)
    worker = Worker(
        model,
        lowered=lower(plan, graph, cluster, clip=True),
        communicator=Communicator(rank=world.rank, world_size=3, device=CPU),
        loss_count=count,
        optimizer=optimizer_of,
        total_steps=STEPS,
        clip_grad_norm=CLIP,
    )
    losses = []
    for step in range(STEPS):
        model.turn = turn_of(step)
        model.heads[2].requires_grad_(step != 3)  # frozen in its first turn
        losses.append(worker.step(batch_of(step)).loss)
    weights = {name: tensor.clone() for name, tensor in worker.state.state_dict()["model"].items()}
    worker.close()
    return losses, weights


@pytest.mark.parametrize("zero", [0, 1, 2])
def test_a_head_that_rests_is_left_alone_as_on_one_device(pool: Pool, zero: int) -> None:
    model, expected = Heads(), []
    optimizer = optimizer_of(model.parameters())
    for step in range(STEPS):
        model.turn = turn_of(step)
        model.heads[2].requires_grad_(step != 3)
        optimizer.zero_grad()
        loss = model(**batch_of(step))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        expected.append(loss.item())
    for losses, weights in pool.run(3, trained, zero):
        assert losses == pytest.approx(expected, rel=1e-5)
        torch.testing.assert_close(weights, dict(model.state_dict()), rtol=1e-5, atol=1e-6)

"""What it costs to see whether a script has changed anything, beside a step of a small model."""

from __future__ import annotations

import time
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from heterodyne.api.stage_cutting import again_of
from heterodyne.frontend import trace
from heterodyne.plan.lower import lower
from heterodyne.runtime.comm.communicator import Communicator
from heterodyne.runtime.worker import Worker
from multiprocess.pool import World
from multiprocess.work import cluster_of, plan_of

__all__ = ["watching"]

STEPS, LOOKS, WIDTH, LAYERS = 20, 200, 128, 4


class Stack(nn.Module):
    """A few layers of a small transformer: 65 modules, whose step takes some ten milliseconds."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True)
        self.tokens, self.layers = nn.Embedding(64, WIDTH), nn.TransformerEncoder(layer, LAYERS)
        self.head = nn.Linear(WIDTH, 64)

    def forward(self, tokens: Tensor) -> Tensor:
        logits = self.head(self.layers(self.tokens(tokens)))
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def watching(world: World) -> tuple[float, float]:
    """Median seconds of a step, and of all that looks for changes in it, where nothing has changed: of the thread that does both, on one
    core. What it waits for (ranks compare what they have seen while they compute) and other processes do not count."""
    torch.manual_seed(0)
    model, batch = Stack(), {"tokens": torch.randint(0, 64, (8, 32), generator=torch.Generator().manual_seed(0))}
    captured, cluster = trace(model, batch), cluster_of(world.world_size)
    plan = plan_of(captured.graph, cluster, tuple((8 // world.world_size,) for _ in range(world.world_size)))
    worker = Worker(
        model,
        lowered=lower(plan, captured.graph, cluster, clip=False),
        communicator=Communicator(rank=world.rank, world_size=world.world_size, device=torch.device("cpu")),
        loss_count=captured.loss_count,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01),
        total_steps=STEPS,
        clip_grad_norm=0.0,
        again=again_of(captured, model),
    )
    steps = [_timed(lambda: worker.step(batch)) for _ in range(STEPS)]

    def look() -> None:
        worker._variants.step(STEPS).agreed()
        worker._variants.leave()

    looks = [_timed(look) for _ in range(LOOKS)]
    worker.close()
    return median(steps[3:]), median(looks)


def _timed(do: Any) -> float:
    started_s = time.thread_time()
    do()
    return time.thread_time() - started_s

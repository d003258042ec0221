"""A model whose layers take the time that they are told to: a device of a pace of its own, however busy the processor is."""

from __future__ import annotations

import functools
import time

import torch
from torch import nn
from torch.nn import functional as F

from heterodyne.frontend import Captured, trace

__all__ = ["sleeping", "traced"]

FORWARD_S = 0.004  # of a layer, for a sample; the backward takes twice as long
WIDTH, LENGTH, LAYERS = 128, 4, 6


def _sleep(like: torch.Tensor, seconds: float) -> None:
    """Behind what the device has to wait for."""
    like.flatten()[:1].clone()
    time.sleep(seconds * len(like))


@torch.library.custom_op("heterodyne_benchmarks::work", mutates_args=())
def work(hidden: torch.Tensor) -> torch.Tensor:
    _sleep(hidden, FORWARD_S)
    return hidden.clone()


@torch.library.custom_op("heterodyne_benchmarks::work_backward", mutates_args=())
def work_backward(gradient: torch.Tensor) -> torch.Tensor:
    _sleep(gradient, 2 * FORWARD_S)
    return gradient.clone()


work.register_fake(torch.empty_like)
work_backward.register_fake(torch.empty_like)
work.register_autograd(lambda _, gradient: work_backward(gradient))


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.into, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.out(work(F.gelu(self.into(self.norm(hidden)))))


class Sleeping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return (x - y).square().mean()


def sleeping() -> nn.Module:
    torch.manual_seed(0)
    return Sleeping().train()


@functools.cache
def traced() -> tuple[nn.Module, Captured, dict[str, torch.Tensor]]:
    """The model, what its capture says, and a batch."""
    generator = torch.Generator().manual_seed(0)
    batch = {name: torch.randn(32, LENGTH, WIDTH, generator=generator) for name in ("x", "y")}
    module = sleeping()
    return module, trace(module, {name: value[:4] for name, value in batch.items()}, name="sleeping"), batch

"""Optimizers of lives. Gradients that are zero up to rounding must not become whole steps: hence large eps."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, AdamW, Optimizer

__all__ = ["OPTIMIZERS", "ScheduleFree"]


class ScheduleFree(Optimizer):
    """SGD without a schedule (Defazio et al., 2024): in train mode parameters lie between a fast iterate and its average, in eval mode
    they are the average.
    """

    def __init__(self, parameters: Iterable[Any], lr: float = 0.05, beta: float = 0.9) -> None:
        super().__init__(parameters, {"lr": lr, "beta": beta, "training": True, "k": 0})

    def _move(self, *, training: bool, end: Callable[[float], float]) -> None:
        for group in self.param_groups:
            if group["training"] == training:
                continue
            for p in group["params"]:
                if "z" in self.state[p]:
                    p.data.lerp_(self.state[p]["z"], end(group["beta"]))
            group["training"] = training

    def eval(self) -> None:
        self._move(training=False, end=lambda beta: 1 - 1 / beta)

    def train(self) -> None:
        self._move(training=True, end=lambda beta: 1 - beta)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # no closure
        for group in self.param_groups:
            if not group["training"]:
                raise RuntimeError("call optimizer.train() before the step")
            group["k"] += 1
            for p in group["params"]:
                if p.grad is None:
                    continue
                z = self.state[p].setdefault("z", p.detach().clone())
                beta, lr = group["beta"], group["lr"]
                p.lerp_(z, 1 / group["k"])
                p.add_(p.grad, alpha=lr * (beta * (1 - 1 / group["k"]) - 1))
                z.sub_(p.grad, alpha=lr)


OPTIMIZERS: Mapping[str, Callable[[Iterable[nn.Parameter | Tensor]], Optimizer]] = {
    "sgd": partial(SGD, lr=0.05, momentum=0.9),
    "adamw": partial(AdamW, lr=0.01, eps=1e-3),
    "adagrad": partial(Adagrad, lr=0.02, eps=1e-3),
    "schedule-free": ScheduleFree,
}

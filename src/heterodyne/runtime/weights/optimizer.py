"""The update: AdamW or SGD, as PyTorch has them, and a learning rate that is a pure function of the step."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from heterodyne.errors import CheckpointError
from heterodyne.job import OptimizerSection

__all__ = ["initialise_state", "learning_rate", "load_state_by_name", "make_optimizer", "state_by_name"]


def learning_rate(section: OptimizerSection, step: int, total_steps: int) -> float:
    """The rate of a step, counted from 0.

    Linear warm-up: (step + 1) / warmup_steps of ``lr``. Then, for ``cosine``, half a cosine from ``lr`` at the end of the warm-up
    to ``min_lr_ratio * lr`` at the last step (Loshchilov & Hutter, "SGDR", 2017, without restarts); later steps stay there.
    """
    if step < section.warmup_steps:
        return section.lr * (step + 1) / section.warmup_steps
    if section.schedule == "constant":
        return section.lr
    length = max(1, total_steps - 1 - section.warmup_steps)
    progress = min(1.0, (step - section.warmup_steps) / length)
    cosine = 0.5 * (1 + math.cos(math.pi * progress))
    return section.lr * (section.min_lr_ratio + (1 - section.min_lr_ratio) * cosine)


def make_optimizer(section: OptimizerSection, parameters: Mapping[str, nn.Parameter]) -> torch.optim.Optimizer:
    """PyTorch's own, in its fused form; weight decay on all parameters, as PyTorch has it. There may be none."""
    group = [{"params": list(parameters.values())}]
    if section.name == "adamw":
        return torch.optim.AdamW(
            group, lr=section.lr, betas=section.betas, eps=section.eps, weight_decay=section.weight_decay, fused=True
        )
    return torch.optim.SGD(
        group, lr=section.lr, momentum=section.momentum, weight_decay=section.weight_decay, fused=True
    )


def state_by_name(optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter]) -> dict[str, Any]:
    """The state of each parameter under its name; a parameter that was never updated has none. Tensors are not copied."""
    return {name: dict(optimizer.state[p]) for name, p in parameters.items() if p in optimizer.state}


def load_state_by_name(
    optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter], state: Mapping[str, Any]
) -> None:
    """The inverse of `state_by_name`; tensors are copied to the device of their parameter. Raises CheckpointError."""
    unknown = sorted(set(state) - set(parameters))
    if unknown:
        raise CheckpointError(
            f"the optimizer's state names parameters that the model does not train: {', '.join(unknown[:5])}"
        )
    optimizer.state.clear()
    for name, values in state.items():
        parameter = parameters[name]
        optimizer.state[parameter] = {
            key: _copied(value, parameter) if isinstance(value, Tensor) else value for key, value in values.items()
        }


def initialise_state(optimizer: torch.optim.Optimizer) -> None:
    """Let the optimizer make its state for every parameter that has none, so that there is something to receive it in.

    A step with zero gradients and rate zero makes the state and changes no parameter.
    """
    rates = [group["lr"] for group in optimizer.param_groups]
    missing = [p for group in optimizer.param_groups for p in group["params"] if p not in optimizer.state]
    kept = [(p, p.grad) for group in optimizer.param_groups for p in group["params"]]
    for parameter, _ in kept:
        parameter.grad = None
    for parameter in missing:
        parameter.grad = torch.zeros_like(parameter)
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    optimizer.step()
    for parameter, gradient in kept:
        parameter.grad = gradient
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate


def _copied(value: Tensor, parameter: nn.Parameter) -> Tensor:
    return value.detach().to(device=parameter.device, copy=True)

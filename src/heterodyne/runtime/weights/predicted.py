"""Weights as the next update is expected to leave them, for forwards that run before it.

XPipe (Guan et al., arXiv 1911.04610) predicts by the optimizer's moments alone. By then most micro-batches of the step have come back, so
here their gradients count too: the prediction is the update that the optimizer would make if those that are still on their way had the
mean gradient of those that are there. It is exact for a step all of whose micro-batches are.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from heterodyne.errors import PlanError

__all__ = ["PredictedWeights", "require_moments"]

_ADAM = (torch.optim.Adam, torch.optim.AdamW)


def require_moments(optimizer: torch.optim.Optimizer) -> None:
    """Raise PlanError for an optimizer whose next update cannot be predicted by its moments."""
    kind = type(optimizer)
    if kind in _ADAM or (kind is torch.optim.SGD and all(group["momentum"] for group in optimizer.param_groups)):
        return
    lacks = "SGD without momentum" if kind is torch.optim.SGD else kind.__name__
    raise PlanError(
        f"weights are not predicted for {lacks} ('async: predicted'), but by the moments of torch's AdamW, Adam and SGD with momentum: "
        "take one of these, or leave 'async' out"
    )


class _Shown(torch.autograd.Function):
    """The predicted values; their gradient is that of the parameter."""

    @staticmethod
    def forward(_: Any, parameter: Tensor, predicted: Tensor) -> Tensor:  # noqa: ARG004  # its gradient is asked for
        return predicted.view_as(predicted)

    @staticmethod
    def backward(_: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None


class PredictedWeights:
    """Of one rank.

    Args:
        module: the user's model, whose forward reads its parameters by name.
        parameters: those that this rank trains, by name.
        updated: what the optimizer updates of each of them.
        gradients: gives those that have been added up so far, of what the optimizer updates.
        optimizer: one with moments (`require_moments`).
    """

    def __init__(
        self,
        module: nn.Module,
        parameters: Mapping[str, nn.Parameter],
        updated: Mapping[str, nn.Parameter],
        gradients: Callable[[], Mapping[str, Tensor]],
        optimizer: torch.optim.Optimizer,
    ) -> None:
        self._gradients = gradients
        self._parameters, self._updated, self._optimizer = parameters, updated, optimizer
        names = {id(parameter): name for name, parameter in parameters.items()}
        self._places = [
            (owner._parameters, key, names[id(parameter)])
            for owner in module.modules()
            for key, parameter in owner._parameters.items()
            if id(parameter) in names
        ]
        self._free: list[dict[str, Tensor]] = []
        self._shown: dict[
            int, tuple[dict[str, Tensor], dict[str, Tensor]]
        ] = {}  # by step: the values, and as forwards read them

    @property
    def parameters(self) -> Collection[nn.Parameter]:
        """Those that are predicted."""
        return self._parameters.values()

    def has(self, step: int) -> bool:
        """Return whether the weights of a step were predicted."""
        return step in self._shown

    @torch.no_grad()
    def predict(self, step: int, options: Sequence[Mapping[str, Any]], part: float) -> None:
        """Predict the weights of a step by one update more.

        Args:
            options: of the groups of the optimizer in that update.
            part: of the samples of that update, those whose gradients are there.
        """
        held = self._free.pop() if self._free else {n: torch.empty_like(p) for n, p in self._parameters.items()}
        groups = {
            id(p): own
            for group, own in zip(self._optimizer.param_groups, options, strict=False)  # groups may have been added
            for p in group["params"]
        }
        gradients = self._gradients()
        for name, value in held.items():
            own, group = self._updated[name], groups.get(id(self._updated[name]))
            if name in gradients and group is not None:
                value.copy_(_predicted(own, gradients[name] / part, self._optimizer.state.get(own, {}), group))
            else:
                value.copy_(own)
        with torch.enable_grad():
            shown = {name: _Shown.apply(self._parameters[name], value) for name, value in held.items()}  # type: ignore[no-untyped-call]
        self._shown[step] = held, shown

    @contextmanager
    def in_place(self, step: int) -> Iterator[None]:
        """The model has the predicted weights of a step while the block runs."""
        _, shown = self._shown[step]
        kept = [(owner, key, owner[key]) for owner, key, _ in self._places]
        for owner, key, name in self._places:
            owner[key] = shown[name]  # type: ignore[assignment]  # a module's own table takes any tensor
        try:
            yield
        finally:
            for owner, key, parameter in kept:
                owner[key] = parameter

    def release(self, step: int) -> None:
        """Let other steps have the memory of these."""
        self._free.append(self._shown.pop(step)[0])

    def clear(self) -> None:
        """Let go of all memory."""
        self._free.clear()
        self._shown.clear()


def _predicted(weight: Tensor, gradient: Tensor, state: Mapping[str, Any], group: Mapping[str, Any]) -> Tensor:
    """Return a weight after one more update by this gradient, as Adam, AdamW or SGD of torch makes it."""
    gradient = (-gradient if group["maximize"] else gradient).to(weight.dtype)
    rate, decay = group["lr"], group["weight_decay"]
    decoupled = group.get("decoupled_weight_decay", False)
    if decay and not decoupled:
        gradient = gradient.add(weight, alpha=decay)
    if "betas" not in group:
        momentum, before = group["momentum"], state.get("momentum_buffer")
        by = gradient if before is None else before.mul(momentum).add_(gradient, alpha=1 - group["dampening"])
        return weight.add(gradient.add(by, alpha=momentum) if group["nesterov"] else by, alpha=-rate)
    (of_mean, of_square), done = group["betas"], float(state.get("step", 0)) + 1
    mean, square = gradient.mul(1 - of_mean), gradient.square().mul_(1 - of_square)
    if state:
        mean.add_(state["exp_avg"], alpha=of_mean)
        square.add_(state["exp_avg_sq"], alpha=of_square)
    if state and group["amsgrad"]:
        torch.maximum(state["max_exp_avg_sq"], square, out=square)
    by = square.sqrt_().mul_((1 - of_square**done) ** -0.5).add_(group["eps"])
    moved: Tensor = weight.mul(1 - rate * decay if decoupled else 1.0)
    return moved.addcdiv_(mean, by, value=-rate / (1 - of_mean**done))

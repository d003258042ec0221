"""Weights as the next update is expected to leave them, for forwards that run before it (XPipe: Guan et al., arXiv 1911.04610).

The prediction is the update that the optimizer's moments alone would make: of Adam and AdamW ``w - lr * m / (sqrt(v) + eps)``, with both
moments corrected for their bias and with the decay of AdamW, of SGD ``w - lr * momentum``. Before the first update it is the weight itself.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
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
        f"{lacks} has no moments by which weights could be predicted ('async: predicted'): take torch's AdamW, Adam or SGD with momentum, "
        "or leave 'async' out"
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
        optimizer: one with moments (`require_moments`).
    """

    def __init__(
        self,
        module: nn.Module,
        parameters: Mapping[str, nn.Parameter],
        updated: Mapping[str, nn.Parameter],
        optimizer: torch.optim.Optimizer,
    ) -> None:
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
    def predict(self, step: int, options: Sequence[Mapping[str, Any]]) -> None:
        """Predict the weights of a step by one update more; ``options``: of the groups of the optimizer in that update."""
        held = self._free.pop() if self._free else {n: torch.empty_like(p) for n, p in self._parameters.items()}
        groups = {
            id(p): own
            for group, own in zip(self._optimizer.param_groups, options, strict=False)  # groups may have been added
            for p in group["params"]
        }
        for name, value in held.items():
            own = self._updated[name]
            state = self._optimizer.state.get(own)
            if state:
                value.copy_(_predicted(own, state, groups[id(own)]))
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


def _predicted(weight: Tensor, state: Mapping[str, Any], group: Mapping[str, Any]) -> Tensor:
    """Return a weight after one more update by the moments of the optimizer."""
    sign, rate = 1 if group["maximize"] else -1, group["lr"]
    if "exp_avg" not in state:
        return weight.add(state["momentum_buffer"], alpha=sign * rate)
    (first, second), done = group["betas"], float(state["step"])
    by: Tensor = state["max_exp_avg_sq" if group["amsgrad"] else "exp_avg_sq"].sqrt()
    by.mul_((1 - second**done) ** -0.5).add_(group["eps"])
    torch.div(state["exp_avg"], by, out=by).mul_(sign * rate / (1 - first**done))
    decay = group["weight_decay"] if group.get("decoupled_weight_decay") else 0.0
    return by.add_(weight, alpha=1 - rate * decay)

"""A function mode that replaces some functions of torch while it is active, and leaves the user's modules as they are.

PyTorch takes a function mode off while it handles a call. For most functions that is right; for those that are Python code and
call what must be replaced, `Interception` runs the same code with the mode still on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from heterodyne.eager import without_overrides

__all__ = ["BatchNormCall", "Function", "Interception", "batch_norms"]

Function = Callable[..., Any]

# The backward is among them for the parts of a model that are computed again in it.
_SEEN_THROUGH: Final = (torch.autograd.backward, F.multi_head_attention_forward, F.gumbel_softmax)


class Interception(TorchFunctionMode):
    """While active, each function of ``handlers`` is replaced; inside a handler the mode is off."""

    def __init__(self, handlers: Mapping[Function, Function]) -> None:
        super().__init__()
        seen_through = {function: partial(self._inside, without_overrides(function)) for function in _SEEN_THROUGH}
        self._handlers: dict[Function, Function] = {**seen_through, **handlers}

    def __torch_function__(
        self,
        func: Function,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        return self._handlers.get(func, func)(*args, **(kwargs or {}))

    def _inside(self, function: Function, *args: Any, **kwargs: Any) -> Any:
        with self:
            return function(*args, **kwargs)


@dataclass(frozen=True)
class BatchNormCall:
    """What BatchNorm is called with. ``input``: [N, C, ...]; statistics, weight and bias: [C]."""

    input: Tensor
    running_mean: Tensor | None
    running_var: Tensor | None
    weight: Tensor | None
    bias: Tensor | None
    momentum: float
    eps: float


def batch_norms(in_training: Callable[[BatchNormCall], Tensor]) -> dict[Function, Function]:
    """Return handlers for the functions of torch that compute BatchNorm: ``in_training`` where it takes statistics of its input."""

    def batch_norm(
        input: Tensor,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        training: bool = False,
        momentum: float = 0.1,
        eps: float = 1e-5,
        cudnn_enabled: bool = True,  # noqa: ARG001  # it decides which kernel runs
    ) -> Tensor:
        if not training:
            return F.batch_norm(input, running_mean, running_var, weight, bias, False, momentum, eps)
        return in_training(BatchNormCall(input, running_mean, running_var, weight, bias, momentum, eps))

    def in_the_order_of_torch(
        input: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        *options: Any,
        **named: Any,
    ) -> Tensor:
        return batch_norm(input, running_mean, running_var, weight, bias, *options, **named)

    return {F.batch_norm: batch_norm, torch.batch_norm: in_the_order_of_torch}

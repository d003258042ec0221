"""A function mode that replaces some functions of torch while it is active, and leaves the user's modules as they are.

PyTorch takes a function mode off while it handles a call. For most functions that is right; for those that are Python code and
call what must be replaced, `Interception` runs the same code with the mode still on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from heterodyne.eager import without_overrides

__all__ = ["Function", "Interception", "batch_norms"]

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


def batch_norms(handler: Function) -> dict[Function, Function]:
    """The functions of torch that compute BatchNorm, each handled by a function with the arguments of ``F.batch_norm``."""

    def in_the_order_of_torch(
        input: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        training: bool,
        momentum: float,
        eps: float,
        cudnn_enabled: bool,  # noqa: ARG001  # it decides which kernel runs
    ) -> Any:
        return handler(input, running_mean, running_var, weight, bias, training, momentum, eps)

    return {F.batch_norm: handler, torch.batch_norm: in_the_order_of_torch}

"""What stands in place of the gradients of a step that is done: a loop that reads one gets an error at its own line."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from heterodyne.errors import HeterodyneError
from heterodyne.runtime.weights.masters import gradient_dtype

__all__ = ["SpentGradient", "mark_spent", "take_away_spent"]

_AS_THEY_ARE = frozenset(
    getattr(Tensor, name).__get__
    for name in (
        "shape",
        "dtype",
        "device",
        "layout",
        "grad_fn",
        "requires_grad",
        "is_sparse",
        "is_meta",
        "is_cpu",
        "is_cuda",
    )
)
# Of zero_grad(set_to_none=False), which is as good before the next step.
_CLEARING = frozenset({Tensor.zero_, Tensor.detach_, Tensor.requires_grad_, torch._foreach_zero_})


class SpentGradient(Tensor):
    """Raises HeterodyneError for all that is done with it, but to clear it or to ask of what shape it is."""

    @classmethod
    def __torch_function__(
        cls, function: Callable[..., Any], types: Iterable[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        if function in _CLEARING:
            return args[0]
        if function in _AS_THEY_ARE:
            return super().__torch_function__(function, types, args, kwargs or {})  # type: ignore[no-untyped-call]
        raise HeterodyneError(
            f"the loop calls {getattr(function, '__name__', 'a function')} on a gradient after accelerator.backward(loss), which has made "
            "the update already, from gradients that are on several ranks. Clip by Accelerator(clip_grad_norm=...), whose clip_grad_norm_ "
            "gives the norm; what is done to each value of a gradient, such as clamp, write into step() of an optimizer of your own"
        )


def mark_spent(parameters: Iterable[Tensor]) -> None:
    """Put one in place of the gradient of each parameter that is trained."""
    with torch._C.DisableTorchFunctionSubclass():  # also where not every rank holds it, and uses of it are refused
        for parameter in parameters:
            if parameter.requires_grad:
                value = torch.empty((), dtype=gradient_dtype(parameter), device=parameter.device)
                parameter.grad = value.expand(parameter.shape).as_subclass(SpentGradient)


def take_away_spent(parameters: Iterable[Tensor]) -> None:
    """Leave no gradient where one was marked."""
    with torch._C.DisableTorchFunctionSubclass():
        for parameter in parameters:
            if isinstance(parameter.grad, SpentGradient):
                parameter.grad = None

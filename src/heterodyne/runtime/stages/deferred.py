"""Split backward: the gradients of a stage's inputs first (I), those of its weights later (W).

`DeferredWeights` is entered around a forward. A matrix product with a parameter gets a backward that passes on the gradient of
its input at once, and keeps what the weight gradient is computed from, for `run`. Only linear layers are deferred: in a transformer half
of the backward is their weight gradients. Everything else is done in I, convolutions too.

A weight gradient is written or accumulated in place by one kernel: computing it first and adding it later would cost more memory traffic
than a whole backward has.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx
from torch.nn import functional as F

from heterodyne.products import give_back, take_place
from heterodyne.runtime.weights.gradients import GradientBuckets
from heterodyne.runtime.weights.masters import gradient_dtype

__all__ = ["DeferredWeights"]


class DeferredWeights:
    """The deferred weight gradients of one forward of one stage. ``home`` None: gradients stay where they are computed."""

    def __init__(self, home: GradientBuckets | None = None) -> None:
        self._home = home
        self._later: list[Callable[[], None]] = []

    def __enter__(self) -> Self:
        take_place(self)
        return self

    def __exit__(self, *_: object) -> None:
        give_back()

    def run(self) -> None:
        """Compute the weight gradients in the order of the backward; what each is computed from is freed with it."""
        later, self._later = deque(self._later), []
        with torch.no_grad():
            while later:
                later.popleft()()

    def linear(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return ``input @ weight.T + bias``."""
        if not _is_trained(weight) or (bias is not None and bias.requires_grad and not bias.is_leaf):
            return F.linear(input, weight, bias)
        output: Tensor = _Linear.apply(*_cast(input, weight, bias), self, False)  # type: ignore[no-untyped-call]
        return output

    def addmm(self, bias: Tensor, input: Tensor, weight: Tensor, **scales: Any) -> Tensor:
        """Return ``input @ weight + bias``."""
        if scales or bias.dim() != 1 or not _is_trained(weight) or (bias.requires_grad and not bias.is_leaf):
            return torch.addmm(bias, input, weight, **scales)
        output: Tensor = _Linear.apply(*_cast(input, weight, bias), self, True)  # type: ignore[no-untyped-call]
        return output

    def defer(self, make: Callable[[], None]) -> None:
        self._later.append(make)

    def add_product(self, parameter: Tensor, left: Tensor, right: Tensor) -> None:
        """Add ``left @ right`` to the gradient of a parameter."""
        if left.dtype is not gradient_dtype(parameter):
            self.add(parameter, left @ right)
            return
        if parameter.grad is None:
            parameter.grad = torch.mm(left, right, out=self._place(parameter))
        else:
            parameter.grad.addmm_(left, right)
        self._tell(parameter)

    def add(self, parameter: Tensor, gradient: Tensor) -> None:
        """Add to the gradient of a parameter."""
        if parameter.grad is None:
            place = self._place(parameter)
            parameter.grad = gradient.to(gradient_dtype(parameter)) if place is None else place.copy_(gradient)
        else:
            parameter.grad += gradient
        self._tell(parameter)

    def _place(self, parameter: Tensor) -> Tensor | None:
        return None if self._home is None else self._home.place(parameter)

    def _tell(self, parameter: Tensor) -> None:
        if self._home is not None:
            self._home.added(parameter)


def _is_trained(weight: Tensor) -> bool:
    return isinstance(weight, nn.Parameter) and weight.requires_grad and torch.is_grad_enabled()


def _cast(
    input: Tensor, weight: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """The same, and weight and bias as autocast would have them: inside of an autograd function it is too late for it."""
    kind = input.device.type
    if not torch.is_autocast_enabled(kind):
        return input, weight, bias, None, None
    dtype = torch.get_autocast_dtype(kind)
    return input.to(dtype), weight, bias, weight.detach().to(dtype), None if bias is None else bias.detach().to(dtype)


class _Linear(torch.autograd.Function):
    """y = x w^T + b; with ``transposed`` weights y = x w + b. ``cast``, ``cast_bias``: weight and bias in the dtype of x, if theirs is
    another.
    """

    @staticmethod
    def forward(
        ctx: FunctionCtx,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        cast: Tensor | None,
        cast_bias: Tensor | None,
        deferred: DeferredWeights,
        transposed: bool,
    ) -> Tensor:
        w, b = (weight, bias) if cast is None else (cast, cast_bias)
        ctx.save_for_backward(x, w)
        ctx.parameters, ctx.deferred, ctx.transposed = (weight, bias), deferred, transposed  # type: ignore[attr-defined]
        y = F.linear(x, w.t() if transposed else w, b)
        # With more than two dims it is a view of a matrix, which nothing could write into after an autograd function.
        own: Tensor = torch.ops.aten._unsafe_view(y, y.shape)
        return own

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        x, w = ctx.saved_tensors
        weight, bias = ctx.parameters
        deferred, transposed = ctx.deferred, ctx.transposed

        def make() -> None:
            entering, leaving = x.reshape(-1, x.shape[-1]), upstream.reshape(-1, upstream.shape[-1])
            deferred.add_product(weight, *((entering.t(), leaving) if transposed else (leaving.t(), entering)))
            if bias is not None and bias.requires_grad:
                deferred.add(bias, leaving.sum(0))

        deferred.defer(make)
        of_input = upstream @ (w.t() if transposed else w) if ctx.needs_input_grad[0] else None
        return of_input, *([None] * 6)

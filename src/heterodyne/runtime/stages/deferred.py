"""The two halves of a backward: the gradients of a stage's inputs first, those of its weights when there is time.

`DeferredWeights` is a function mode for the forward. A product with a parameter gets a backward that passes the gradient of its
input on at once, and keeps what the gradient of the weight is made of, for `run`. Linear layers are worth it: they are what the
backward of a transformer spends its time on, half of it on weights. Everything else is done in the first half, convolutions too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx
from torch.nn import functional as F

from heterodyne.runtime.exact.interception import Interception

__all__ = ["DeferredWeights"]


class DeferredWeights(Interception):
    """What one forward of one stage leaves for later."""

    def __init__(self) -> None:
        super().__init__({F.linear: self._linear, torch.addmm: self._addmm})
        self._later: list[Callable[[], None]] = []

    def run(self) -> None:
        """Make the gradients of the weights, in the order in which the backward came to them."""
        later, self._later = self._later, []
        for make in later:
            make()

    def _linear(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        if not _is_trained(weight) or (bias is not None and bias.requires_grad and not bias.is_leaf):
            return F.linear(input, weight, bias)
        output: Tensor = _Linear.apply(*_cast(input, weight, bias), weight, bias, self._later, False)  # type: ignore[no-untyped-call]
        return output

    def _addmm(self, bias: Tensor, input: Tensor, weight: Tensor, **scales: Any) -> Tensor:
        """``input @ weight + bias``, the linear layer of models that keep their weights transposed."""
        if scales or bias.dim() != 1 or not _is_trained(weight) or (bias.requires_grad and not bias.is_leaf):
            return torch.addmm(bias, input, weight, **scales)
        output: Tensor = _Linear.apply(*_cast(input, weight, bias), weight, bias, self._later, True)  # type: ignore[no-untyped-call]
        return output


def _is_trained(weight: Tensor) -> bool:
    return isinstance(weight, nn.Parameter) and weight.requires_grad and torch.is_grad_enabled()


def _cast(input: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """As autocast would: inside of an autograd function it is too late for it."""
    kind = input.device.type
    if not torch.is_autocast_enabled(kind):
        return input, weight.detach(), None if bias is None else bias.detach()
    dtype = torch.get_autocast_dtype(kind)
    return input.to(dtype), weight.detach().to(dtype), None if bias is None else bias.detach().to(dtype)


class _Linear(torch.autograd.Function):
    """y = x w^T + b; with ``transposed`` weights y = x w + b.

    ``weight`` and ``bias`` are passed again as parameters, so that y depends on something that is trained.
    """

    @staticmethod
    def forward(
        ctx: FunctionCtx,
        x: Tensor,
        w: Tensor,
        b: Tensor | None,
        weight: Tensor,
        bias: Tensor | None,
        later: list[Callable[[], None]],
        transposed: bool,
    ) -> Tensor:
        ctx.save_for_backward(x, w)
        ctx.parameters, ctx.later, ctx.transposed = (weight, bias), later, transposed  # type: ignore[attr-defined]
        return F.linear(x, w.t() if transposed else w, b)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        x, w = ctx.saved_tensors
        weight, bias = ctx.parameters

        def make() -> None:
            entering, leaving = x.reshape(-1, x.shape[-1]), upstream.reshape(-1, upstream.shape[-1])
            _accumulate(weight, entering.t() @ leaving if ctx.transposed else leaving.t() @ entering)
            if bias is not None and bias.requires_grad:
                _accumulate(bias, leaving.sum(0))

        ctx.later.append(make)
        of_input = upstream @ (w.t() if ctx.transposed else w) if ctx.needs_input_grad[0] else None
        return of_input, *([None] * 7)


def _accumulate(parameter: Tensor, gradient: Tensor) -> None:
    """As a backward would, with its hooks."""
    torch.autograd.backward(parameter, gradient.to(parameter.dtype))

"""Random numbers that belong to the samples: what a model draws beside dropout (stochastic depth, noise, samples of a distribution).

`SampleNoise` stands in for torch's own functions while `SampleDropout` is active. It makes uniform and normal numbers out of
the hash bits of each element, so a sample meets the same noise under any plan.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor

from heterodyne.runtime.exact.interception import Function

__all__ = ["SampleNoise"]

Draw = Callable[[torch.Size, torch.dtype, torch.device], Tensor]

# Binary digits that a number below 1 may have without being rounded to 1.
_DIGITS: Final = {torch.float16: 11, torch.bfloat16: 8}
_MOST_DIGITS: Final = 24


class SampleNoise:
    """Stands in for torch's functions. ``bits`` gives an int32 hash for each element of a tensor of a shape."""

    def __init__(self, bits: Callable[[torch.Size], Tensor]) -> None:
        self._bits = bits

    def handlers(self) -> dict[Function, Function]:
        """What to call in place of what."""
        return {
            torch.rand: _made(self._uniform),
            torch.randn: _made(self._normal),
            torch.rand_like: _made_like(self._uniform),
            torch.randn_like: _made_like(self._normal),
            torch.bernoulli: self._bernoulli,
            Tensor.bernoulli: self._bernoulli,
            Tensor.bernoulli_: self._bernoulli_,
            Tensor.uniform_: self._uniform_,
            Tensor.normal_: self._normal_,
            Tensor.exponential_: self._exponential_,
        }

    def _uniform(self, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
        """In [0, 1)."""
        digits = _DIGITS.get(dtype, _MOST_DIGITS)
        whole = (self._bits(shape) >> (32 - digits)).bitwise_and_(2**digits - 1)
        return whole.to(device, torch.promote_types(dtype, torch.float32)).mul_(2.0**-digits).to(dtype)

    def _normal(self, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
        """By the inverse of the distribution function, at the middle of each of 2^24 steps."""
        middle = self._uniform(shape, torch.promote_types(dtype, torch.float32), device).add_(0.5**25)
        # The last step's middle is 1 in single precision, where the inverse has no end.
        return torch.erfinv(middle.clamp_(max=1 - 0.5**24).mul_(2).sub_(1)).mul_(math.sqrt(2)).to(dtype)

    def _bernoulli(self, input: Tensor, p: float | None = None, **_: Any) -> Tensor:
        drawn = self._uniform(input.shape, torch.float32, input.device)
        return (drawn < (input if p is None else p)).to(input.dtype)

    def _bernoulli_(self, tensor: Tensor, p: float | Tensor = 0.5, **_: Any) -> Tensor:
        return tensor.copy_(self._uniform(tensor.shape, torch.float32, tensor.device) < p)

    def _uniform_(self, tensor: Tensor, *bounds: float, **options: Any) -> Tensor:
        low = bounds[0] if bounds else options.get("from", 0.0)
        high = bounds[1] if len(bounds) > 1 else options.get("to", 1.0)
        return tensor.copy_(self._uniform(tensor.shape, tensor.dtype, tensor.device).mul_(high - low).add_(low))

    def _normal_(self, tensor: Tensor, mean: float = 0.0, std: float = 1.0, **_: Any) -> Tensor:
        return tensor.copy_(self._normal(tensor.shape, tensor.dtype, tensor.device).mul_(std).add_(mean))

    def _exponential_(self, tensor: Tensor, lambd: float = 1.0, **_: Any) -> Tensor:
        return tensor.copy_(self._uniform(tensor.shape, torch.float32, tensor.device).neg_().log1p_().div_(-lambd))


def _made(draw: Draw) -> Function:
    def like_rand(*size: Any, dtype: torch.dtype | None = None, device: Any = None, **options: Any) -> Tensor:
        given = options.pop("size", size[0] if len(size) == 1 and not isinstance(size[0], int) else size)
        place = torch.get_default_device() if device is None else torch.device(device)
        drawn = draw(torch.Size(given), dtype or torch.get_default_dtype(), place)
        return drawn.requires_grad_(options.get("requires_grad", False))

    return like_rand


def _made_like(draw: Draw) -> Function:
    def like(input: Tensor, *, dtype: torch.dtype | None = None, device: Any = None, **options: Any) -> Tensor:
        place = input.device if device is None else torch.device(device)
        drawn = draw(input.shape, dtype or input.dtype, place)
        return drawn.requires_grad_(options.get("requires_grad", False))

    return like

"""Random numbers that belong to the samples: what a model draws beside dropout (stochastic depth, noise, samples of a distribution).

`SampleNoise` stands in for torch's own functions while `SampleDropout` is active. It makes uniform, normal and whole numbers out of
the hash bits of each element, so a sample gets the same noise under any plan.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor

from heterodyne.runtime.exact.interception import Function

__all__ = ["SampleNoise"]

Draw = Callable[[torch.Size, torch.dtype, torch.device], Tensor]

# Binary digits that a number below 1 may have without being rounded to 1.
_DIGITS: Final = {torch.float16: 11, torch.bfloat16: 8}
_MOST_DIGITS: Final = 24
_MOST_OF_ONE_WORD: Final = 2**31


class SampleNoise:
    """Stands in for torch's functions. ``bits`` gives an int32 hash for each element of a tensor of a shape."""

    def __init__(self, bits: Callable[[torch.Size], Tensor]) -> None:
        self._bits = bits

    def handlers(self) -> dict[Function, Function]:
        """Return what to call in place of what."""
        return {
            torch.rand: _made(self._uniform),
            torch.randn: _made(self._normal),
            torch.rand_like: _made_like(self._uniform),
            torch.randn_like: _made_like(self._normal),
            torch.randint: self._randint,
            torch.randint_like: self._randint_like,
            torch.normal: self._around,
            torch.bernoulli: self._bernoulli,
            Tensor.bernoulli: self._bernoulli,
            Tensor.bernoulli_: self._bernoulli_,
            Tensor.uniform_: self._uniform_,
            Tensor.normal_: self._normal_,
            Tensor.exponential_: self._exponential_,
            Tensor.random_: self._random_,
        }

    def _uniform(self, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
        """In [0, 1)."""
        digits = _digits(dtype)
        whole = (self._bits(shape) >> (32 - digits)).bitwise_and_(2**digits - 1)
        return whole.to(device, torch.promote_types(dtype, torch.float32)).mul_(2.0**-digits).to(dtype)

    def _normal(self, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
        """By the inverse of the distribution function, at the middle of each of 2^24 steps."""
        middle = self._uniform(shape, torch.promote_types(dtype, torch.float32), device).add_(0.5**25)
        # The last step's middle is 1 in single precision, where the inverse has no end.
        return torch.erfinv(middle.clamp_(max=1 - 0.5**24).mul_(2).sub_(1)).mul_(math.sqrt(2)).to(dtype)

    def _whole(self, shape: torch.Size, low: int, high: int) -> Tensor:
        """In [low, high), int64."""
        if high <= low:
            return torch.randint(low, high, shape)  # which says what is wrong
        if high - low <= _MOST_OF_ONE_WORD:
            return (self._unsigned(shape) * (high - low) >> 32).add_(low)
        words = self._unsigned(torch.Size((*shape, 2)))
        return ((words[..., 0] >> 1 << 32) + words[..., 1]).remainder_(high - low).add_(low)

    def _unsigned(self, shape: torch.Size) -> Tensor:
        """The bits as whole numbers from 0 to 2^32 - 1."""
        return self._bits(shape).long().bitwise_and_(2**32 - 1)

    def _randint(self, *given: Any, dtype: torch.dtype | None = None, device: Any = None, **options: Any) -> Tensor:
        bounds = list(given) if "size" in options else list(given[:-1])
        shape = torch.Size(options["size"] if "size" in options else given[-1])
        low, high = _bounds(bounds, options)
        place = torch.get_default_device() if device is None else torch.device(device)
        return self._whole(shape, low, high).to(place, dtype or torch.int64)

    def _randint_like(self, input: Tensor, *bounds: int, **options: Any) -> Tensor:
        low, high = _bounds(bounds, options)
        return self._whole(input.shape, low, high).to(
            options.get("device") or input.device, options.get("dtype") or input.dtype
        )

    def _random_(self, tensor: Tensor, *bounds: int | None, **options: Any) -> Tensor:
        most = 2 ** _digits(tensor.dtype) + 1 if tensor.is_floating_point() else torch.iinfo(tensor.dtype).max
        low, high = _bounds(bounds, {("low" if name == "from" else "high"): value for name, value in options.items()})
        return tensor.copy_(self._whole(tensor.shape, low, most if high is None else high))

    def _around(self, mean: Tensor | float, std: Tensor | float = 1.0, size: Any = None, **options: Any) -> Tensor:
        like = next((value for value in (mean, std) if isinstance(value, Tensor)), None)
        if like is None:
            drawn: Tensor = _made(self._normal)(size, **options)
            return drawn * std + mean
        shape = torch.as_tensor(mean + std).shape  # one of them is a tensor
        return self._normal(shape, like.dtype, like.device) * std + mean

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


def _digits(dtype: torch.dtype) -> int:
    return _DIGITS.get(dtype, _MOST_DIGITS)


def _bounds(given: Sequence[Any], options: Mapping[str, Any]) -> tuple[int, Any]:
    """The least number and the one after the greatest, of functions that take ``high`` or ``low, high``."""
    bounds = [*given, *(options[name] for name in ("low", "high") if options.get(name) is not None)]
    low, high = (bounds if len(bounds) > 1 else [0, *bounds, None])[:2]
    return low, high


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

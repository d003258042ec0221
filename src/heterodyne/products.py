"""Products with weights, as the graphs of stages call them: who splits a backward takes their place while a forward runs.

A function mode could do so too, but it is asked at each call of torch, which costs more than what it would gain.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

__all__ = ["Products", "addmm", "give_back", "linear", "take_place"]


class Products(Protocol):
    """Computes the same products in another way."""

    def linear(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor: ...
    def addmm(self, bias: Tensor, input: Tensor, weight: Tensor, **scales: Any) -> Tensor: ...


_instead: list[Products] = []


def take_place(products: Products) -> None:
    """Let ``products`` compute from now on, until `give_back`."""
    _instead.append(products)


def give_back() -> None:
    """Let who computed before `take_place` do so again."""
    _instead.pop()


def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return ``input @ weight.T + bias``."""
    return _instead[-1].linear(input, weight, bias) if _instead else F.linear(input, weight, bias)


def addmm(bias: Tensor, input: Tensor, weight: Tensor, **scales: Any) -> Tensor:
    """Return ``input @ weight + bias``, the linear layer of models that keep their weights transposed."""
    if _instead:
        return _instead[-1].addmm(bias, input, weight, **scales)
    return torch.addmm(bias, input, weight, **scales)

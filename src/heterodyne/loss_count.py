"""How the losses of the parts of a batch make up the loss of the batch: the one interface of capture and runtime."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from heterodyne.graph.ir import Loss

__all__ = ["CountedBy", "LossCount", "TogetherCount"]


class LossCount(Protocol):
    """What a loss is divided by. Statistics of parts of a batch add up to those of the batch; ``[1 + n]``, samples first."""

    @property
    def counts_data(self) -> bool:
        """Return whether the samples must be read to know the statistics; else their number is all there is to know."""

    @property
    def size(self) -> int:
        """Return how many statistics there are, with the number of samples."""

    def statistics(self, part: Mapping[str, Tensor], samples: int, buffers: Mapping[str, Tensor]) -> Tensor:
        """Return the statistics of a part of a batch, in float64 on the host, with the buffers of the model by name (they may weight
        classes).
        """

    def weight(self, part: Tensor, whole: Tensor) -> float:
        """By what the loss of a part is multiplied to be its part of the loss of the whole; 0 if its denominator is 0."""

    @property
    def split(self) -> bool:
        """Return whether the terms of the loss have denominators of their own; the graph is then given those of the whole batch."""

    def divisors(self, whole: Tensor) -> Mapping[str, Tensor]:
        """Return what a split loss is given beside the batch, by name; nothing for any other."""

    def total(self, whole: Tensor) -> float:
        """Return what people see that the loss counts in a batch: its denominator, else the samples."""

    def is_defined(self, whole: Tensor) -> bool:
        """Return whether no denominator of the loss is 0."""

    @property
    def together(self) -> bool:
        """Return whether the loss compares samples: then each replica computes the loss of the whole batch, from all its samples at
        once."""


@dataclass(frozen=True)
class CountedBy:
    """A loss that is a sum (weight 1), a mean over the samples, or divided by what ``count`` counts in a part of the batch.

    ``count(part, buffers)``: adds up over the parts of a batch; only called if ``loss`` counts tokens.
    """

    count: Callable[[Mapping[str, Tensor], Mapping[str, Tensor]], float]
    loss: Loss

    @property
    def counts_data(self) -> bool:
        return self.loss.reduction == "mean" and self.loss.count == "tokens"

    @property
    def size(self) -> int:
        return 2 if self.counts_data else 1

    def statistics(self, part: Mapping[str, Tensor], samples: int, buffers: Mapping[str, Tensor]) -> Tensor:
        counted = [float(self.count(part, buffers))] if self.counts_data else []
        return torch.tensor([float(samples), *counted], dtype=torch.float64)

    def weight(self, part: Tensor, whole: Tensor) -> float:
        if self.loss.reduction == "sum":
            return 1.0
        return self.total(part) / self.total(whole) if self.total(part) else 0.0

    @property
    def split(self) -> bool:
        return False

    @property
    def together(self) -> bool:
        return False

    def divisors(self, whole: Tensor) -> Mapping[str, Tensor]:
        del whole
        return {}

    def total(self, whole: Tensor) -> float:
        return float(whole[-1])

    def is_defined(self, whole: Tensor) -> bool:
        return self.loss.reduction == "sum" or self.total(whole) != 0


@dataclass(frozen=True)
class TogetherCount:
    """A loss that each replica computes for the whole batch: it counts as much as each of the others."""

    counts_data: bool = True
    split: bool = False
    together: bool = True
    size: int = 2

    def statistics(self, part: Mapping[str, Tensor], samples: int, buffers: Mapping[str, Tensor]) -> Tensor:
        del part, buffers
        return torch.tensor([float(samples), 1.0 if samples else 0.0], dtype=torch.float64)

    def weight(self, part: Tensor, whole: Tensor) -> float:
        return float(part[1] / whole[1])

    def divisors(self, whole: Tensor) -> Mapping[str, Tensor]:
        del whole
        return {}

    def total(self, whole: Tensor) -> float:
        return float(whole[0])

    def is_defined(self, whole: Tensor) -> bool:
        return bool(whole[0] > 0)

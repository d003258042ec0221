"""How much each part of the batch counts, so that unequal parts add up to the loss of one device.

A mean loss over a part is its sum over the part, divided by the part's own count N(part). The loss of the whole batch is

    sum over parts of  N(part) / N(batch) * loss(part),     N(batch) = sum of N(part) over all ranks

and its gradient is the same sum of gradients. N counts samples, or whatever the loss counts (labels that are not ignored).
A summed loss has weight 1 everywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from heterodyne.errors import DataError
from heterodyne.graph.ir import Loss
from heterodyne.runtime.meeting.communicator import Channel

__all__ = ["LossCount", "Weights", "counts"]

# What the loss counts in a part of the batch, with the buffers of the model by name (it may weigh classes by one of them).
LossCount: TypeAlias = Callable[[Mapping[str, Tensor], Mapping[str, Tensor]], float]


def counts(
    loss: Loss,
    parts: Sequence[Mapping[str, Tensor]],
    sizes: Sequence[int],
    count: LossCount,
    buffers: Mapping[str, Tensor],
) -> list[float]:
    """What each part counts: its samples, or ``count(part, buffers)`` where that depends on the data; 1 for a summed loss."""
    if loss.reduction == "sum":
        return [1.0] * len(sizes)
    if loss.count == "samples":
        return [float(size) for size in sizes]
    return [float(count(part, buffers)) for part in parts]


class Weights:
    """The weights of this rank's micro-batches in one step.

    Counting tokens takes an all-reduce of one number over all ranks; it is started here, and waited for when a weight is first
    asked for, which is before the first backward. ``answers``: what this rank counts is not counted by another one too.
    """

    def __init__(
        self, loss: Loss, own: Sequence[float], global_batch_size: int, channel: Channel, *, answers: bool = True
    ) -> None:
        self.own = tuple(own)
        self._summed = loss.reduction == "sum"
        self._known = None if loss.reduction == "mean" and loss.count == "tokens" else float(global_batch_size)
        self._sum = torch.tensor([sum(own) if answers else 0.0], dtype=torch.float64)
        self._pending = channel.all_reduce(self._sum) if self._known is None else None

    def require_some(self) -> None:
        """Raises DataError if nothing in the whole batch counts: one device would divide by zero."""
        if self.total <= 0:
            raise DataError(
                "no sample of the global batch has a label that the loss counts, so its mean does not exist: "
                "leave such batches out, or make the global batch larger"
            )

    @property
    def total(self) -> float:
        """N(batch)."""
        if self._known is None:
            if self._pending is not None:
                self._pending.wait()
            self._known = self._sum.item()
        return self._known

    def of(self, index: int) -> float:
        """The weight of a micro-batch. Raises DataError as `require_some` does."""
        if self._summed:
            return 1.0
        self.require_some()
        return self.own[index] / self.total

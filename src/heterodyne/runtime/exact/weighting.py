"""How much each part of the batch counts, so that unequal parts add up to the loss of one device.

A mean loss over a part is its sum over the part, divided by the part's own count N(part). The loss of the whole batch is

    sum over parts of  N(part) / N(batch) * loss(part),     N(batch) = sum of N(part) over all ranks

and its gradient is the same sum of gradients. N counts samples, or whatever the loss counts (labels that are not ignored).
A summed loss has weight 1 everywhere.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from heterodyne.errors import DataError
from heterodyne.graph.ir import Loss
from heterodyne.runtime.meeting.channel import Channel

__all__ = ["Weights"]


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

"""A loss in which samples see each other, at the end of a pipeline: it is computed once, when all micro-batches have run forward.

What the last stage has made of each micro-batch, up to where samples see each other, is kept. With the last of them the replicas exchange
it, and each computes the loss of the whole batch. The first backward after that takes the gradient of that loss by what was kept; each
micro-batch goes on from its own part of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

__all__ = ["JointLoss", "LossOfParts"]


class _Part(NamedTuple):
    inputs: Mapping[str, Tensor]
    values: Mapping[str, Tensor]
    samples: int


class LossOfParts(Protocol):
    """The end of such a loss."""

    @property
    def reads(self) -> tuple[str, ...]:
        """The names of what it reads of the stages."""

    def of_parts(self, parts: Sequence[Any], order: Tensor | None = None) -> Tensor:
        """The loss of the whole batch, from inputs, values and number of samples of each part. Collective over the replicas.

        ``order``: where each sample of the batch is among those of the replicas, one replica after the other; None: in their order.
        """


class JointLoss:
    """Args:
    stage: the last one. loss: the end of the loss.
    spans: of each rank that ends in the loss, in the order in which they exchange, first sample and number of each micro-batch.
    """

    def __init__(self, stage: int, loss: LossOfParts, spans: Sequence[Sequence[tuple[int, int]]]) -> None:
        self.stage = stage
        self._loss = loss
        samples = [sample for own in spans for first, size in own for sample in range(first, first + size)]
        in_order = sorted(range(len(samples)), key=samples.__getitem__)
        # Devices that share the micro-batches of a stage have slices of each.
        self._order = None if in_order == list(range(len(samples))) else torch.tensor(in_order)
        self._kept: dict[int, _Part] = {}
        self._expected, self._planned = 1, False
        self._whole: Tensor | None = None

    def begin(self, parts: int | None) -> None:
        """Expect so many micro-batches of this rank; None: all its samples in one piece, as in evaluation."""
        self._kept.clear()
        self._planned, self._expected, self._whole = parts is not None, parts or 1, None

    def forward(
        self, index: int, inputs: Mapping[str, Tensor], values: Mapping[str, Tensor], samples: int
    ) -> tuple[dict[str, Tensor], Tensor | None]:
        """Return what the backward of a micro-batch begins at; and with the last one the loss of the batch, times the number of
        micro-batches, of which each counts one part."""
        made = {name: values[name] for name in self._loss.reads}
        leaves = {name: value.detach().requires_grad_(value.requires_grad) for name, value in made.items()}
        self._kept[index] = _Part(inputs, leaves, samples)
        if len(self._kept) == self._expected:
            parts = [self._kept[place] for place in sorted(self._kept)]
            self._whole = self._loss.of_parts(parts, self._order if self._planned else None) * self._expected
        return made, self._whole

    def backward(self, index: int, weight: float) -> dict[str, Tensor]:
        """The gradients by what the forward returned; ``weight``: of the micro-batch."""
        if self._whole is not None and self._whole.requires_grad:
            torch.autograd.backward(self._whole, torch.full_like(self._whole, weight))
        self._whole = None
        leaves = self._kept.pop(index).values
        return {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}

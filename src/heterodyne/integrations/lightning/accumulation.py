"""Several batches that make one step, as one batch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from heterodyne.api import Distributed
from heterodyne.errors import DataError
from heterodyne.integrations.lightning.training_step import size_of

__all__ = ["joined", "require_mean"]


def joined(batches: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Accumulated batches as one. Raises DataError if they cannot be."""
    first, *others = batches
    if not others:
        return dict(first)
    size = size_of(first)
    try:
        return {
            name: torch.cat([batch[name] for batch in batches]) if t.dim() and len(t) == size else t
            for name, t in first.items()
        }
    except RuntimeError as error:
        raise DataError(
            f"the batches of a step have different shapes ({error}): pad them to one length, or take larger batches without "
            "accumulate_grad_batches"
        ) from error


def require_mean(distributed: Distributed, batches: Sequence[Mapping[str, Tensor]]) -> None:
    """Raises DataError unless the loss of accumulated batches is the mean of their losses, which Lightning takes."""
    if len(batches) == 1:
        return
    weights, kind = distributed.loss_weights(batches), distributed.graph.loss.reduction
    if kind != "mean" or any(not math.isclose(weight * len(batches), 1.0) for weight in weights):
        raise DataError(
            f"the loss of the {len(batches)} batches of a step is not the mean of their losses (their weights in it are "
            f"{', '.join(f'{weight:.4g}' for weight in weights)}, and it is a {kind}): take a batch size {len(batches)} times as large "
            "without accumulate_grad_batches"
        )

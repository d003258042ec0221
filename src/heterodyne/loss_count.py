"""What each part of a batch counts in its loss: told once, for stages that run in halves and for the runtime."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

from torch import Tensor

from heterodyne.graph.ir import Loss

__all__ = ["LossCount", "counts"]

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

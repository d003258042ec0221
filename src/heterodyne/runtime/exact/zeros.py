"""Zeros of which a model is made at first: behind a factor that is zero, no comparison of values shows what is wrong."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from heterodyne.graph.ir import ModelGraph

__all__ = ["wake_batch", "wake_buffers", "wake_weights"]


def wake_weights(module: nn.Module) -> None:
    """Give weights that begin as zero (of adapters, of heads) small random values: a zero hides the gradients of all before it."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.is_floating_point() and _is_zero(parameter):
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.02)


def wake_buffers(module: nn.Module, graph: ModelGraph) -> list[str]:
    """Give buffers that are zero, and that the graph computes with, other values; return their names.

    An integer is woken where it is alone: it counts steps. Statistics of BatchNorm are not read in training.
    """
    read = {name for op in graph.ops if op.name not in graph.batch_statistics for name in op.parameters}
    woken = []
    for name, buffer in module.named_buffers():
        if name in read and _is_zero(buffer) and (buffer.is_floating_point() or _is_a_count(buffer)):
            with torch.no_grad():
                buffer.copy_(_values(buffer))
            woken.append(name)
    return woken


def wake_batch(batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return other values for the entries of a batch that are numbers and all zero."""
    return {n: _values(tensor) for n, tensor in batch.items() if tensor.is_floating_point() and _is_zero(tensor)}


def _is_zero(tensor: Tensor) -> bool:
    return bool(tensor.numel()) and not tensor.any()


def _is_a_count(tensor: Tensor) -> bool:
    return tensor.numel() == 1 and tensor.dtype is not torch.bool


def _values(tensor: Tensor) -> Tensor:
    """Positive, so that roots and logarithms stay defined, and below 1, as shares and probabilities are."""
    generator = torch.Generator().manual_seed(0)
    values = torch.rand(tensor.shape, generator=generator) * 0.1 + 0.05 if tensor.is_floating_point() else torch.ones(1)
    return values.reshape(tensor.shape).to(tensor)

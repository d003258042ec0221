"""Small batches that show whether parts add up to the whole: unequal parts, one of which counts nothing in the loss."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
from torch import Tensor, nn

from heterodyne.errors import DataError
from heterodyne.graph.ir import ModelGraph
from heterodyne.loss_count import LossCount
from heterodyne.runtime.slices import BatchSource, union

__all__ = [
    "EMPTY",
    "Empty",
    "SmallBatch",
    "small_batch",
    "wake_batch",
    "wake_buffers",
    "wake_weights",
    "without_counts",
]

Empty: TypeAlias = Literal["made up", "found", "none"]
"""Which sample that counts nothing a small batch has: one with other labels if the batch has none, one of the batch, none."""

EMPTY: tuple[Empty, ...] = ("made up", "found", "none")

_MOST_LOOKED_AT = 16
_IGNORED = (-100, 0, -1, 255, 1, 2)  # what labels and masks say where nothing counts
_OF_STATISTICS = 4  # fewer samples than that make the statistics of a batch, and so its gradients, a matter of rounding


@dataclass(frozen=True, kw_only=True)
class SmallBatch:
    """Some samples, and the parts in which they are fed.

    ``empty_first``: the first part counts nothing in the loss; ``made_up``: because its labels were changed.
    """

    tensors: dict[str, Tensor]
    parts: tuple[int, ...]
    empty_first: bool = False
    made_up: bool = False

    @property
    def size(self) -> int:
        return sum(self.parts)


def small_batch(
    source: BatchSource,
    graph: ModelGraph,
    loss_count: LossCount,
    buffers: Mapping[str, Tensor],
    samples: int,
    *,
    empty: Empty = "made up",
) -> SmallBatch:
    """``samples`` of a batch in parts of 1, 1 and the rest (1 and the rest, if there are three).

    Where what the loss counts depends on the data, the first sample is one that counts nothing, as far as ``empty`` wants it. Where
    samples are mixed (BatchNorm), parts repeat the same samples, so that all of them have the same statistics; if they are dropped
    out too, or see each other in the loss, there is one part. Raises DataError if no sample counts.
    """
    if graph.batch_statistics:
        return _repeated(source, graph)
    places = [place % source.size for place in range(samples)]
    parts = (1, 1, samples - 2) if samples > 3 else (1, samples - 1)
    if graph.loss.reduction == "coupled":
        return SmallBatch(tensors=_samples(source, graph, places), parts=(samples,))
    if not loss_count.counts_data:
        return SmallBatch(tensors=_samples(source, graph, places), parts=parts)
    looked_at = range(min(source.size, _MOST_LOOKED_AT))
    counts = {place: _counted(source.samples(place, 1), 1, loss_count, buffers) for place in looked_at}
    counting = [place for place in looked_at if counts[place]]
    if not counting:
        raise DataError("no sample of the example counts in the loss")
    rest = [counting[place % len(counting)] for place in range(samples)]
    without = next((place for place in looked_at if not counts[place]), None)
    if empty != "none" and without is not None:
        return SmallBatch(tensors=_samples(source, graph, [without, *rest[1:]]), parts=parts, empty_first=True)
    tensors = _samples(source, graph, rest)
    changed = without_counts(tensors, graph, loss_count, buffers, range(1)) if empty == "made up" else None
    made_up = changed is not None
    return SmallBatch(tensors=changed or tensors, parts=parts, empty_first=made_up, made_up=made_up)


def without_counts(
    tensors: Mapping[str, Tensor],
    graph: ModelGraph,
    loss_count: LossCount,
    buffers: Mapping[str, Tensor],
    samples: range,
) -> dict[str, Tensor] | None:
    """A batch in which these samples count nothing in the loss, by other labels or masks; None if no inputs decide that."""
    if not loss_count.counts_data:
        return None
    dims = {entry.name: entry.batch_dim for entry in graph.inputs}

    def left(batch: Mapping[str, Tensor]) -> int:
        part = {
            name: tensor if (dim := dims[name]) is None else tensor.narrow(dim, samples.start, len(samples))
            for name, tensor in batch.items()
        }
        return _counted(part, len(samples), loss_count, buffers)

    made, counted = dict(tensors), left(tensors)
    for name, tensor in tensors.items():
        dim = dims[name]
        for value in () if dim is None else _values(tensor):
            changed = tensor.clone()
            changed.narrow(dim or 0, samples.start, len(samples)).fill_(value)
            try:
                now = left({**made, name: changed})
            except (DataError, IndexError, RuntimeError):
                continue  # the value is none that this input can have
            if now < counted:
                made, counted = {**made, name: changed}, now
    return None if counted else made


def _values(tensor: Tensor) -> Iterator[float]:
    if tensor.dtype is torch.bool or tensor.is_floating_point():
        yield 0
    elif not tensor.is_complex():
        least = torch.iinfo(tensor.dtype).min
        yield from (value for value in _IGNORED if value >= least)


def _counted(part: Mapping[str, Tensor], samples: int, loss_count: LossCount, buffers: Mapping[str, Tensor]) -> int:
    """Return how many of the statistics of some samples, their number left out, are not 0.

    On the host: a value that is no label of the model's must not reach a device, where it may end more than this.
    """
    on_host = {name: tensor.cpu() for name, tensor in part.items()}
    return int(loss_count.statistics(on_host, samples, buffers)[1:].count_nonzero())


def _samples(source: BatchSource, graph: ModelGraph, places: Sequence[int]) -> dict[str, Tensor]:
    return union(source, [(place, 1) for place in places], graph)


def _repeated(source: BatchSource, graph: ModelGraph) -> SmallBatch:
    few = [place % source.size for place in range(_OF_STATISTICS)]
    if graph.random or graph.loss.reduction == "coupled":
        return SmallBatch(tensors=_samples(source, graph, few), parts=(_OF_STATISTICS,))
    return SmallBatch(tensors=_samples(source, graph, few * 3), parts=(_OF_STATISTICS, 2 * _OF_STATISTICS))


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
                buffer.copy_(_woken_values(buffer))
            woken.append(name)
    return woken


def wake_batch(batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return other values for the entries of a batch that are numbers and all zero."""
    return {n: _woken_values(tensor) for n, tensor in batch.items() if tensor.is_floating_point() and _is_zero(tensor)}


def _is_zero(tensor: Tensor) -> bool:
    return bool(tensor.numel()) and not tensor.any()


def _is_a_count(tensor: Tensor) -> bool:
    return tensor.numel() == 1 and tensor.dtype is not torch.bool


def _woken_values(tensor: Tensor) -> Tensor:
    """Positive, so that roots and logarithms stay defined, and below 1, as shares and probabilities are."""
    generator = torch.Generator().manual_seed(0)
    values = torch.rand(tensor.shape, generator=generator) * 0.1 + 0.05 if tensor.is_floating_point() else torch.ones(1)
    return values.reshape(tensor.shape).to(tensor)

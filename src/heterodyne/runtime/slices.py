"""The global batch, of which each worker takes its own slices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias, runtime_checkable

import torch
from torch import Tensor
from typing_extensions import TypeIs

from heterodyne.errors import DataError
from heterodyne.graph.ir import ModelGraph

__all__ = ["BatchSource", "GlobalBatchLike", "OneShape", "as_source", "is_source", "union"]


@runtime_checkable
class BatchSource(Protocol):
    """A global batch that hands out samples, so that a worker reads only its own."""

    @property
    def size(self) -> int: ...

    def samples(self, first: int, count: int) -> Mapping[str, Tensor]:
        """Samples ``[first, first + count)`` of the global batch, by input name."""


def is_source(batch: object) -> TypeIs[BatchSource]:
    """Whether a batch hands out samples. What is a mapping or a sequence of tensors is known at once; a protocol is slow to ask for."""
    return not isinstance(batch, dict | list | tuple) and isinstance(batch, BatchSource)


GlobalBatchLike: TypeAlias = Mapping[str, Tensor] | Sequence[Tensor] | BatchSource


@dataclass(frozen=True, kw_only=True)
class _Tensors:
    """A global batch that is there as a whole. An input that does not follow the batch goes to every slice as it is."""

    tensors: dict[str, Tensor]
    batch_dims: dict[str, int | None]
    size: int

    def samples(self, first: int, count: int) -> dict[str, Tensor]:
        return {
            name: tensor if (dim := self.batch_dims[name]) is None else tensor.narrow(dim, first, count)
            for name, tensor in self.tensors.items()
        }


def as_source(batch: GlobalBatchLike, graph: ModelGraph) -> BatchSource:
    """The batch as something that hands out samples. Raises DataError if it is not what the model was captured with."""
    if is_source(batch):
        return batch
    dims = {entry.name: entry.batch_dim for entry in graph.inputs}
    given = dict(batch) if isinstance(batch, Mapping) else dict(zip(dims, batch, strict=False))
    if set(given) != set(dims) or len(given) != len(batch):
        shown = ", ".join(batch) if isinstance(batch, Mapping) else f"{len(batch)} tensors"
        raise DataError(
            f"the batch has {shown}; the model was captured with {', '.join(dims)}: pass those, in each batch. What only some batches have "
            "belongs into the example batch, and into the others with values that change nothing (a mask of ones)"
        )
    sizes = {name: given[name].shape[dim] for name, dim in dims.items() if dim is not None}
    if len(set(sizes.values())) != 1:
        raise DataError(f"the inputs of the batch do not agree on its size: {sizes}")
    return _Tensors(tensors=given, batch_dims=dims, size=next(iter(sizes.values())))


class OneShape:
    """A batch of which all slices must have the shapes of the first one that is read, but for their samples.

    The stages of a cut model exchange tensors whose shapes all ranks work out for themselves, from one sample. Slices that were padded
    each to its own longest sample would not meet. `samples` raises DataError for one of another shape.
    """

    def __init__(self, source: BatchSource, batch_dims: Mapping[str, int | None]) -> None:
        self._source = source
        self._follows = batch_dims
        self._first: dict[str, tuple[int, ...]] | None = None

    @property
    def size(self) -> int:
        return self._source.size

    def samples(self, first: int, count: int) -> Mapping[str, Tensor]:
        slice_ = self._source.samples(first, count)
        shapes = {
            name: tuple(size for dim, size in enumerate(tensor.shape) if dim != self._follows.get(name))
            for name, tensor in slice_.items()
        }
        if self._first is None:
            self._first = shapes
        for name, shape in shapes.items():
            if shape != self._first.get(name, shape):
                raise DataError(
                    f"samples {first} to {first + count} have {name} of shape {list(shape)}, others of the same batch "
                    f"{list(self._first[name])}: where the plan cuts the model, all of a global batch has one shape. Pad to a fixed "
                    "length, give the lengths of the samples (lengths=, or the attribute lengths of the dataset), by which all are "
                    "padded to the longest, or take a plan in which each device runs the whole model (strategy data)"
                )
        return slice_


def union(source: BatchSource, spans: Sequence[tuple[int, int]], graph: ModelGraph) -> dict[str, Tensor]:
    """The samples of several ``(first, count)`` spans as one batch."""
    parts = [source.samples(first, count) for first, count in spans]
    if len(parts) == 1:
        return dict(parts[0])
    dims = {entry.name: entry.batch_dim for entry in graph.inputs}
    return {
        name: tensor if (dim := dims[name]) is None else torch.cat([part[name] for part in parts], dim)
        for name, tensor in parts[0].items()
    }

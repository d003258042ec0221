"""Whether the values of a batch lie where the model can look them up, seen before they reach a device.

A token outside of the vocabulary would end a step in an error of a kernel: on accelerators one that says neither which value it was nor
where, after which the process has no device any more.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from heterodyne.errors import DataError
from heterodyne.graph.ir import Argument, ModelGraph, Op, Ref
from heterodyne.graph.size import Size
from heterodyne.graph.value_bounds import Taken, ValueBound, value_bounds
from heterodyne.runtime.slices import BatchSource

__all__ = ["ValuesInRange"]


class ValuesInRange:
    """Looks at batches of one model. A look costs two numbers of each input that something is looked up by."""

    def __init__(self, graph: ModelGraph) -> None:
        self._sizes = {
            entry.name: tuple(None if dim == entry.batch_dim else size for dim, size in enumerate(entry.spec.shape))
            for entry in graph.inputs
        }
        self._batch_dims = {entry.name: entry.batch_dim for entry in graph.inputs}
        self._bounds: dict[str, list[ValueBound]] = {}
        for bound in value_bounds(graph):
            self._bounds.setdefault(bound.field, []).append(bound)

    def require(
        self, tensors: Mapping[str, Tensor], first: int, where: str, number_of: Callable[[int], int] | None = None
    ) -> None:
        """Raises DataError for a value of some samples that is out of range, and for samples without any.

        Args:
            tensors: the samples, by the names of the inputs.
            first: the place of the first of them in the global batch.
            where: what the batch belongs to ("step 12").
            number_of: of a place in the global batch which sample of the dataset it is.
        """
        for field, bounds in self._bounds.items():
            tensor = tensors.get(field)
            if tensor is None or tensor.is_meta or (tensor.dim() and not tensor.shape[0]):
                continue
            if not tensor.numel():
                raise DataError(
                    f"{where}: {field} is {list(tensor.shape)}, so its samples are empty: leave such samples out of the data"
                )
            tensor = tensor.long()  # a bound may be beyond what a narrow one can hold
            seen = _extremes(tensor)
            for bound in bounds:
                if _inside(bound, seen) or not (bound.fixed or self._sized_as_captured(tensors)):
                    continue
                if bound.ignore is not None and _inside(bound, _extremes(tensor.where(tensor != bound.ignore, 0))):
                    continue
                found = self._found(bound, tensor)
                if found is not None:
                    value, place = found
                    raise DataError(f"{where}{_sample(place, first, number_of)}: {_told(bound, value)}")

    def source(self, source: BatchSource, where: str) -> BatchSource:
        """The same batch, whose samples are looked at when they are handed out."""
        return _LookedAt(source, self, where) if self._bounds else source

    def _found(self, bound: ValueBound, tensor: Tensor) -> tuple[int, int | None] | None:
        """The first value that is out of range and looked up, and its sample."""
        dim = self._batch_dims[bound.field]
        if bound.taken:
            size = 1 if dim is None else tensor.shape[dim]
            try:
                for taken in bound.taken:
                    tensor = _taken(taken, tensor, size)
            except RuntimeError:  # written for inputs of other sizes: whether the value is looked up is not known
                return None
            dim = bound.taken[-1].op.samples[bound.taken[-1].output]
        places = _outside(bound, tensor).nonzero()
        if not len(places):
            return None
        place = places[0].tolist()
        return int(tensor[tuple(place)]), None if dim is None else place[dim]

    def _sized_as_captured(self, tensors: Mapping[str, Tensor]) -> bool:
        return all(
            len(tensors[name].shape) == len(sizes)
            and all(size is None or size(1) == found for size, found in zip(sizes, tensors[name].shape, strict=True))
            for name, sizes in self._sizes.items()
            if name in tensors
        )


@dataclass(frozen=True)
class _LookedAt:
    inner: BatchSource
    values: ValuesInRange
    where: str

    @property
    def size(self) -> int:
        return self.inner.size

    def samples(self, first: int, count: int) -> Mapping[str, Tensor]:
        found = self.inner.samples(first, count)
        self.values.require(found, first, self.where, getattr(self.inner, "number_of", None))
        return found


def _extremes(tensor: Tensor) -> tuple[int, int]:
    """The lowest and the highest value. An accelerator is waited for once."""
    low, high = torch.stack(torch.aminmax(tensor)).tolist()
    return low, high


def _inside(bound: ValueBound, extremes: tuple[int, int]) -> bool:
    return extremes[0] >= 0 and extremes[1] < bound.size


def _outside(bound: ValueBound, tensor: Tensor) -> Tensor:
    outside = (tensor < 0) | (tensor >= bound.size)
    return outside if bound.ignore is None else outside & (tensor != bound.ignore)


def _taken(taken: Taken, tensor: Tensor, samples: int) -> Tensor:
    """What an op of the graph hands on of a tensor. Raises RuntimeError if it cannot be done with one of these sizes."""
    _, name, overload = taken.op.target.split(".")
    run = getattr(getattr(torch.ops.aten, name), overload)
    found: Tensor | Sequence[Tensor] = run(**_arguments(taken.op, tensor, samples))
    return found if isinstance(found, Tensor) else found[taken.output]


def _arguments(op: Op, tensor: Tensor, samples: int) -> dict[str, Any]:
    def known(value: Argument) -> Any:
        if isinstance(value, Ref):
            return tensor
        if isinstance(value, Size):
            return int(value(samples))
        return [known(entry) for entry in value] if isinstance(value, tuple) else value

    return {name: known(value) for name, value in op.arguments if name not in _TEXTS}


# Types and devices, which the graph knows as text: values stay what they are without.
_TEXTS = frozenset({"dtype", "layout", "device", "pin_memory", "memory_format"})


def _sample(place: int | None, first: int, number_of: Callable[[int], int] | None) -> str:
    if place is None:
        return ""
    of_dataset = "" if number_of is None else f" (number {number_of(first + place)} of the dataset)"
    return f", sample {first + place}{of_dataset}"


def _told(bound: ValueBound, value: int) -> str:
    who = {"rows": "the embedding", "classes": "the loss", "entries": "the tensor that it indexes"}[bound.what]
    at = f" at {bound.source}" if bound.source else ""
    others = "" if bound.ignore is None else f", or {bound.ignore} for what is left out"
    remedy = "the data and the model must be of one tokenizer" if bound.what == "rows" else "correct the data"
    return (
        f"{bound.field} holds {value}; {who}{at} has {bound.size} {bound.what} "
        f"(0 ... {bound.size - 1}{others}): {remedy}, or give the model more {bound.what}"
    )

"""The batches of a loop: a tensor, a tuple or a mapping in, tensors by name out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from heterodyne.errors import DataError
from heterodyne.frontend.example import positional_names
from heterodyne.graph.ir import ModelGraph
from heterodyne.runtime.slices import BatchSource, is_source

__all__ = ["TARGET", "BatchFormat", "BatchLike", "batch_format", "require_like_example"]

BatchLike: TypeAlias = Tensor | Sequence[Tensor] | Mapping[str, Tensor] | BatchSource
TARGET = "target"
"""What the last tensor of a tuple is called where a loss outside of the model reads it."""


@dataclass(frozen=True, kw_only=True)
class BatchFormat:
    """How batches are written, as the example was.

    Args:
        names: of the tensors of a tuple, in order; of a bare tensor its one name; None for mappings, which bring their own.
        bare: a batch is one tensor.
        target: what the last tensor of a tuple is called, if only the loss reads it.
    """

    names: tuple[str, ...] | None
    bare: bool = False
    target: str | None = None

    def named(self, batch: BatchLike, *, without_target: bool = False) -> Mapping[str, Tensor] | BatchSource:
        """Return the tensors by name; of a `BatchSource`, one that hands them out so. ``without_target``: what only the loss reads may be
        missing.

        Raises DataError for anything else than batches of this format.
        """
        if is_source(batch):
            return batch if self.names is None else _Named(batch, self)
        if isinstance(batch, Tensor):
            batch = (batch,)
        tensors = _tensors(batch)
        if isinstance(tensors, Mapping):
            return tensors
        if without_target and self.target is not None and self.names and len(tensors) == len(self.names) - 1:
            return dict(zip(self.names, tensors, strict=False))
        if self.names is None or len(tensors) != len(self.names):
            expected = "a mapping" if self.names is None else f"{len(self.names)} ({', '.join(self.names)})"
            raise DataError(f"the batch has {len(tensors)} tensors, that of the example was {expected}: pass the same")
        return dict(zip(self.names, tensors, strict=True))

    def as_given(self, tensors: Mapping[str, Tensor]) -> BatchLike:
        """Tensors by name in the form of the example."""
        if self.names is None:
            return tensors
        return tensors[self.names[0]] if self.bare else tuple(tensors[name] for name in self.names if name in tensors)


class _Named:
    """A batch whose samples are tensors or tuples, by name."""

    def __init__(self, source: BatchSource, of: BatchFormat) -> None:
        self._source, self._format = source, of

    @property
    def size(self) -> int:
        return self._source.size

    def samples(self, first: int, count: int) -> Mapping[str, Tensor]:
        found = self._format.named(self._source.samples(first, count))
        assert isinstance(found, Mapping)  # samples are no source
        return found

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)  # what it says of itself beside


def batch_format(model: nn.Module, example: BatchLike, *, has_loss: bool) -> BatchFormat:
    """The format of an example. ``has_loss``: there is a loss outside of the model, which reads the last tensor of a tuple.

    Raises DataError if the example is no batch.
    """
    if isinstance(example, BatchSource | Mapping):
        if isinstance(example, Mapping):
            _tensors(example)
        return BatchFormat(names=None)
    if isinstance(example, Tensor):
        return BatchFormat(names=positional_names(model, 1), bare=True)
    count = len(_tensors(example))
    if not has_loss or count < 2:
        return BatchFormat(names=positional_names(model, count))
    names = positional_names(model, count - 1)
    target = TARGET if TARGET not in names else f"{TARGET} of the loss"
    return BatchFormat(names=(*names, target), target=target)


def require_like_example(tensors: Mapping[str, Tensor], graph: ModelGraph) -> None:
    """Raises DataError for an entry of another dtype, or another number of dims, than that of the example."""
    known = {entry.name: entry.spec.dtype for entry in graph.inputs}
    dims = {entry.name: len(entry.spec.shape) for entry in graph.inputs}
    for name, tensor in tensors.items():
        if tensor.dim() != dims.get(name, tensor.dim()):
            raise DataError(
                f"the entry {name} of the batch is {list(tensor.shape)}; it has {dims[name]} dims in the example"
            )
        found = str(tensor.dtype).removeprefix("torch.")
        if found != known.get(name, found):
            raise DataError(
                f"the entry {name} of the batch is {found}, that of the example was {known[name]}: convert it, "
                f"{name}.to(torch.{known[name]})"
            )


def _tensors(batch: object) -> Mapping[str, Tensor] | tuple[Tensor, ...]:
    """Raises DataError for what is not a sequence or mapping of tensors, with the entry that is none."""
    if isinstance(batch, Mapping):
        entries: list[tuple[str, object]] = [(str(name), value) for name, value in batch.items()]
    elif isinstance(batch, tuple | list):
        entries = [(f"number {number}", value) for number, value in enumerate(batch)]
    else:
        what = type(batch).__name__
        hint = "one batch of it, next(iter(loader))" if isinstance(batch, Iterable) else "the tensors of one batch"
        raise DataError(f"the batch is a {what}; a batch is a tensor, a tuple of tensors or a mapping: pass {hint}")
    if not entries:
        raise DataError("the batch is empty: pass the tensors that the model is called with")
    for name, value in entries:
        if not isinstance(value, Tensor):
            raise DataError(
                f"the entry {name} of the batch is a {type(value).__name__}, not a tensor: {_remedy(value)}"
            )
        if value.is_meta or value.layout is not torch.strided:
            kind = "has no data (device 'meta')" if value.is_meta else f"is stored as {value.layout}"
            raise DataError(
                f"the entry {name} of the batch {kind}, and no samples can be cut out of it: pass a dense tensor"
            )
    if isinstance(batch, Mapping):
        return {str(name): value for name, value in batch.items()}
    return tuple(batch)


def _remedy(value: object) -> str:
    if isinstance(value, tuple | list | Mapping):
        inner = next(iter(value.values() if isinstance(value, Mapping) else value), None)
        if isinstance(inner, Tensor):
            return "let collate_fn put all tensors of a batch side by side, in one tuple or mapping"
        return 'let collate_fn make a tensor of it (a tokenizer does with return_tensors="pt")'
    if hasattr(value, "__array__"):
        return "torch.from_numpy makes one"
    if isinstance(value, int | float):
        return "torch.tensor(...) makes one, which all samples share"
    if value is None:
        return "leave it out of every batch, or give it values that change nothing (a mask of ones)"
    return "leave it out, or give it to the model when it is built"

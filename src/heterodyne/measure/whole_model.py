"""A whole model as something that can be measured in one piece, like a block: what the sum of the blocks leaves out shows here."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from heterodyne.errors import MeasureError
from heterodyne.graph.ir import Input
from heterodyne.model_copy import copied

__all__ = ["WholeModel", "resident_bytes", "without_weights"]


@dataclass(frozen=True, kw_only=True)
class WholeModel:
    """The kind ``*``.

    Args:
        build: a copy of the model with weights on a device; its gradients and buffers will be written.
        inputs: those of the model's graph.
        example: a real batch, by the names of the inputs or in their order. Larger and smaller ones are made of its samples.
        loss: the loss in what the model returns.
        build_empty: the same model without weights, on the meta device, its ties kept; None: made from ``build``.
        stored: the model without weights, and where they are read; None: they are in no files.
        resident_bytes: of weights that the model itself has in the memory of this process, which it may not have for training.
        weightless: what ``build`` gives has no values in its weights, for the model has none yet.
    """

    build: Callable[[torch.device], nn.Module]
    inputs: Sequence[Input]
    example: Mapping[str, Tensor] | Sequence[Tensor]
    loss: Callable[[object], Tensor]
    build_empty: Callable[[], nn.Module] | None = None
    weightless: bool = False
    resident_bytes: int = 0
    stored: Callable[[], tuple[nn.Module, Any] | None] | None = None

    def empty(self) -> nn.Module:
        """Without weights, on the meta device; parameters that are tied are so here too."""
        if self.build_empty is not None:
            return self.build_empty()
        return without_weights(self.build(torch.device("cpu")))

    def instantiate(self, batch: int, device: torch.device, *, seed: int = 0) -> tuple[nn.Module, tuple[Tensor, ...]]:
        """Raises MeasureError if the example has not the inputs of the graph. The same for any ``seed``: the data is real."""
        del seed
        tensors = self.inputs_of(batch, device)
        keywords = tuple(i.name for i in self.inputs) if isinstance(self.example, Mapping) else None
        return _LossOf(self.build(device), keywords, self.loss), tensors

    def inputs_of(self, batch: int, device: torch.device) -> tuple[Tensor, ...]:
        """The inputs of that many samples. Raises MeasureError if the example has not the inputs of the graph."""
        names = tuple(i.name for i in self.inputs)
        given = tuple(self.example) if isinstance(self.example, Mapping) else names[: len(self.example)]
        if set(given) != set(names) or len(self.example) != len(names):
            raise MeasureError(
                f"the example has {len(self.example)} tensors ({', '.join(given)}), the model the inputs {', '.join(names)}"
            )
        values = [self.example[n] for n in names] if isinstance(self.example, Mapping) else list(self.example)
        return tuple(
            _resized(value, i.batch_dim, batch).to(device) for i, value in zip(self.inputs, values, strict=True)
        )


def resident_bytes(model: nn.Module) -> int:
    """Return the bytes of the parameters and buffers of a model in the memory of this process, each memory once."""
    stored = [tensor for tensor in (*model.parameters(), *model.buffers()) if tensor.device.type == "cpu"]
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in stored}.values())


def without_weights(model: nn.Module, like: Mapping[str, Tensor] = MappingProxyType({})) -> nn.Module:
    """Return a copy on the meta device, in which tied tensors stay tied. (`Module.to` would part them.)

    ``like``: by name tensors of the shapes that parameters and buffers have in the copy, where those of the model are parts.
    """
    bare: dict[int, object] = {}
    for name, parameter in model.named_parameters():
        empty = torch.empty_like(like.get(name, parameter), device="meta", requires_grad=False)
        bare[id(parameter)] = nn.Parameter(empty, parameter.requires_grad)
    for name, buffer in model.named_buffers():
        bare[id(buffer)] = torch.empty_like(like.get(name, buffer), device="meta")
    return copied(model, bare, lambda tensor: torch.empty_like(tensor, device="meta"))


class _LossOf(nn.Module):
    """A model that takes its inputs in order and returns its loss alone."""

    def __init__(self, model: nn.Module, names: tuple[str, ...] | None, loss: Callable[[object], Tensor]) -> None:
        super().__init__()
        self.model = model
        self._names = names
        self._loss = loss

    def forward(self, *tensors: Tensor) -> Tensor:
        if self._names is None:
            return self._loss(self.model(*tensors))
        return self._loss(self.model(**dict(zip(self._names, tensors, strict=True))))


def _resized(value: Tensor, dim: int | None, size: int) -> Tensor:
    """That many samples: the first ones, and again from the start when they are used up."""
    return value if dim is None else value.index_select(dim, torch.arange(size, device=value.device) % value.shape[dim])

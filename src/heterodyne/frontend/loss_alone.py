"""How a loss outside of the model is averaged, by tracing it alone: the model itself need not have a graph.

The module that puts the two together is traced with a stand-in for the model, which hands out what the model returned for the example.
These tensors are inputs of the trace; they follow the batch where their first dim is its size. They are multiplied with a parameter, so
that they count as what they are: computed from weights, and no denominator may depend on them.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from heterodyne.errors import CaptureError, NoGraphError
from heterodyne.frontend.counting import LossCounter
from heterodyne.frontend.example import read_example
from heterodyne.frontend.export import export
from heterodyne.frontend.loss import read_loss
from heterodyne.graph import Loss
from heterodyne.loss_count import LossCount
from heterodyne.model_output import loss_of

__all__ = ["has_loss_outside", "output_of_model", "trace_loss"]

_OUTPUT = "output_of_model_"


def has_loss_outside(module: nn.Module) -> bool:
    """Return whether it is a model and a loss: ``model`` and ``loss_fn`` of a module whose forward calls the one and then the other."""
    return isinstance(getattr(module, "model", None), nn.Module) and callable(getattr(module, "loss_fn", None))


def output_of_model(module: nn.Module, batch: Mapping[str, Tensor]) -> Any:
    """Return what the model inside returns for a batch, with tensors of that shape that hold one number."""
    found: list[Any] = []
    handle = module.get_submodule("model").register_forward_hook(lambda _module, _inputs, output: found.append(output))
    try:
        with torch.no_grad():
            module(**batch)
    finally:
        handle.remove()
    return pytree.tree_map_only(Tensor, lambda t: torch.zeros((), dtype=t.dtype).expand(t.shape), found[0])


def trace_loss(
    module: nn.Module, example_batch: Mapping[str, Tensor], output: Any, shared: Collection[str] = ()
) -> tuple[Loss, LossCount] | None:
    """Return how the loss is averaged, and what it counts; None if it has no graph either.

    Args:
        module: of a model and a loss, see `has_loss_outside`.
        output: what the model returns for the example.
        shared: inputs that all samples share.

    Raises CaptureError for a loss that cannot be weighted.
    """
    leaves, tree = pytree.tree_flatten(output)
    tensors = {f"{_OUTPUT}{i}": leaf for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)}
    alone = _LossAlone(module, leaves, tree)
    example = read_example(alone, {**example_batch, **tensors}, shared)
    try:
        traced = export(alone, example)
    except NoGraphError:
        return None
    reading = read_loss(traced)
    if reading.split:
        raise CaptureError(
            "the loss adds terms with denominators of their own, and the model has no graph in which each could be divided by that of the "
            "whole batch. Let the terms have one denominator, or return them divided by the number of samples"
        )
    counter = LossCounter(traced, example, reading, dict(alone.named_buffers()))
    return reading.loss, _OfBatch(counter, tuple(tensors))


class _OfBatch:
    """The count of a batch that has no outputs of a model in it: no denominator depends on these."""

    def __init__(self, counter: LossCounter, outputs: tuple[str, ...]) -> None:
        self._counter = counter
        self._outputs = dict.fromkeys(outputs, torch.empty(0))
        self.split = counter.split
        self.together = False
        self.counts_data = counter.counts_data
        self.size = counter.size
        self.weight = counter.weight
        self.divisors = counter.divisors
        self.total = counter.total
        self.is_defined = counter.is_defined

    def statistics(self, part: Mapping[str, Tensor], samples: int, buffers: Mapping[str, Tensor]) -> Tensor:
        del buffers  # those of the loss were read when it was traced
        return self._counter.statistics({**part, **self._outputs}, samples)


class _LossAlone(nn.Module):
    """The loss as a module of the batch and of what the model made of it."""

    def __init__(self, module: nn.Module, leaves: list[Any], tree: Any) -> None:
        super().__init__()
        self._others = {i: leaf for i, leaf in enumerate(leaves) if not isinstance(leaf, Tensor)}
        self._count = len(leaves)

        def output(made: list[Any]) -> Any:  # a function is not copied with the module, as the tree must not be
            return pytree.tree_unflatten(made, tree)

        self._output = output
        self.one = nn.Parameter(torch.ones(()))
        self.stand_in = _StandIn()
        self.module = copy.copy(module)
        self.module._modules = {**module._modules, "model": self.stand_in}
        self.training = module.training

    def forward(self, **tensors: Tensor) -> Tensor:
        made = [
            self._others[i] if i in self._others else _made(tensors[f"{_OUTPUT}{i}"], self.one)
            for i in range(self._count)
        ]
        self.stand_in.output = self._output(made)
        return loss_of(self.module(**{n: t for n, t in tensors.items() if not n.startswith(_OUTPUT)}))


class _StandIn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.output: Any = None

    def forward(self, *_: object, **__: object) -> Any:
        return self.output


def _made(leaf: Tensor, one: Tensor) -> Tensor:
    """The tensor, computed from a weight."""
    return leaf & (one != 0) if leaf.dtype == torch.bool else leaf * one.to(leaf.dtype)

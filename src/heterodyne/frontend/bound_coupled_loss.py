"""A loss in which samples see each other, on one device: its body on the samples of a replica, its tail on those of all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor, fx

from heterodyne.frontend.regions import Regions
from heterodyne.model_output import LOSS

__all__ = ["BoundCoupledLoss", "CrossReplica", "FeatureExchange", "GraphPart", "Part"]


class FeatureExchange(Protocol):
    """What replicas exchange in one forward. Each calls the same methods in the same order."""

    def begin(self, samples: int) -> int:
        """Tell how many samples this replica has; how many all have together."""

    def rows(self, tensor: Tensor, dim: int, rows: int) -> Tensor:
        """The samples of all replicas, in their order, where ``dim`` has ``rows`` entries for each sample; differentiable."""

    def total(self, tensor: Tensor, weight: float) -> Tensor:
        """The sum over the replicas of ``weight * tensor``; differentiable."""


@dataclass(frozen=True, kw_only=True)
class CrossReplica:
    """A tensor that replicas exchange for the tail: ``rows`` of samples along ``dim``, or a ``sum`` or ``mean`` over the samples.

    The rows are in so many ``groups`` (`Samples`): 2 for two inputs of the batch that were joined.
    """

    node: fx.Node
    kind: Literal["rows", "sum", "mean"]
    dim: int = 0
    rows: int = 0
    groups: int = 1


class Part(NamedTuple):
    """A part of a replica's samples: the inputs of the model, what its body made of them, by name, and how many they are."""

    inputs: Mapping[str, Tensor]
    values: Mapping[str, Tensor]
    samples: int


class BoundCoupledLoss:
    """Runs the body on the samples of this replica, and the tail on those of all. Returns the loss of the whole batch.

    ``body``: None where the stages of a pipeline are that.
    """

    def __init__(
        self,
        *,
        exchanged: Sequence[CrossReplica],
        inputs: Mapping[fx.Node, str],
        made: Sequence[fx.Node],
        body: GraphPart | None,
        tail: GraphPart,
        exchange: FeatureExchange,
        training: bool,
    ) -> None:
        self.training = training
        self.evaluating = False
        self._exchanged = exchanged
        self._inputs = inputs
        self._body = body
        self._made = made
        self._tail = tail
        self._exchange = exchange

    def __call__(self, inputs: Mapping[str, Tensor], received: Mapping[str, Tensor], samples: int) -> dict[str, Tensor]:
        """See `BoundStage`; ``samples`` may be 0 in evaluation. Collective over the replicas."""
        del received
        assert self._body is not None
        with Regions() as regions:
            values = dict(zip(self.reads, self._run(self._body, inputs, samples, regions, ()), strict=True))
        return {LOSS: self.of_parts([Part(inputs, values, samples)])}

    @property
    def reads(self) -> tuple[str, ...]:
        """The names of what the tail reads of the body."""
        return tuple(node.name for node in self._made)

    def of_parts(self, parts: Sequence[Part], order: Tensor | None = None) -> Tensor:
        """The loss of the whole batch, from the parts of this replica's samples. Collective over the replicas.

        ``order``: of each sample of the batch, where it is among those of the replicas, one replica after the other; None: in order.
        """
        whole = self._exchange.begin(sum(part.samples for part in parts))
        met = [self._gathered(entry, parts, whole, order) for entry in self._exchanged]
        with Regions() as regions:
            (loss,) = self._run(self._tail, parts[-1].inputs, whole, regions, met)
        return loss

    def _run(
        self, part: GraphPart, inputs: Mapping[str, Tensor], samples: int, regions: Regions, met: Sequence[Tensor]
    ) -> tuple[Tensor, ...]:
        found: tuple[Tensor, ...] = part.run.forward(
            samples,
            self.training,
            regions,
            *met,
            *[inputs[name] for name in part.inputs],
            *[owner[name] for owner, name in part.kept],
        )
        return found

    def _gathered(self, entry: CrossReplica, parts: Sequence[Part], whole: int, order: Tensor | None) -> Tensor:
        node = entry.node
        each = [part.inputs[self._inputs[node]] if node in self._inputs else part.values[node.name] for part in parts]
        if entry.kind == "rows":
            groups = zip(*(value.tensor_split(entry.groups, entry.dim) for value in each), strict=True)
            rows = entry.rows // entry.groups
            gathered = [self._exchange.rows(_joined(own, entry.dim), entry.dim, rows) for own in groups]
            if order is not None:
                places = (order[:, None] * rows + torch.arange(rows)).flatten()
                gathered = [value.index_select(entry.dim, places.to(value.device)) for value in gathered]
            return _joined(gathered, entry.dim)
        samples = sum(part.samples for part in parts)
        if entry.kind == "mean" and len(each) > 1:
            each = [value * (part.samples / samples) for value, part in zip(each, parts, strict=True)]
        total = each[0] if len(each) == 1 else torch.stack(each).sum(0)
        return self._exchange.total(total, samples / whole if entry.kind == "mean" else 1.0)


@dataclass(frozen=True, kw_only=True)
class GraphPart:
    """A graph; it is given what was met, then the ``inputs``, then what the module keeps."""

    run: fx.GraphModule
    inputs: tuple[str, ...]
    kept: tuple[tuple[dict[str, Any], str], ...]


def _joined(rows: Sequence[Tensor], dim: int) -> Tensor:
    return rows[0] if len(rows) == 1 else torch.cat(tuple(rows), dim)

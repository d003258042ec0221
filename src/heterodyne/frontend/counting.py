"""What the loss of any batch is divided by, computed from the part of the graph that leads to it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TypeAlias

import torch
from torch import Tensor

from heterodyne.errors import DataError
from heterodyne.frontend.denominator_graphs import StatisticsGraph, ValueGraph, entries_of
from heterodyne.frontend.example import Batch, Example
from heterodyne.frontend.export import Traced
from heterodyne.frontend.loss_reading import LossReading
from heterodyne.loss_count import LossCount
from heterodyne.model_output import DIVISOR, SAMPLES
from heterodyne.recent import Recent

__all__ = ["LossCounter"]

_MOST_SIZES = 32  # each keeps a graph
_Place: TypeAlias = tuple[str, int, int]
"""An input, one of its dims, and the size there."""


class LossCounter:
    """Counts what a loss is divided by; see `heterodyne.loss_count.LossCount`.

    Made before `split_loss` rewrites the graph: what it needs of that is copied.

    Args:
        again: captures the model for inputs of other sizes than the example's (longer sequences), of which the graph may hold numbers:
            ``torch.arange(x.shape[1]) < lengths``, ``mask.numel()``; None: it holds none.
    """

    def __init__(
        self,
        traced: Traced,
        example: Example,
        reading: LossReading,
        buffers: Mapping[str, Tensor],
        again: Callable[[Batch], LossCount] | None = None,
    ) -> None:
        self._example = example
        self._again = again
        self._indifferent: frozenset[_Place] = frozenset()
        self._at_sizes: Recent[frozenset[_Place], LossCounter] = Recent(_MOST_SIZES)
        self.split = reading.split
        self._power = reading.reduction.samples
        self._denominators = reading.denominators
        self._buffers = dict(buffers)
        self._constants = dict(traced.constants)
        self._statistics = tuple(dict.fromkeys(s for d in self._denominators for s in d.statistics))
        self._of_batch = StatisticsGraph(traced, self._statistics)
        self._values = [ValueGraph(traced, d, self._statistics) for d in self._denominators]
        tiny = any(
            size in (1, 2) for shape in example.shapes for size in shape[1:]
        )  # a 1 may be such a size, or one less
        self._may_hold_sizes = again is not None and (
            tiny or self._of_batch.may_hold_sizes or any(value.may_hold_sizes for value in self._values)
        )

    @property
    def counts_data(self) -> bool:
        """Return whether the samples must be read to know the statistics; else their number is all there is to know."""
        return bool(self._statistics)

    @property
    def together(self) -> bool:
        """Return whether the loss compares samples."""
        return False

    @property
    def size(self) -> int:
        """Return how many statistics there are, with the number of samples."""
        return 1 + sum(entries_of(statistic) for statistic in self._statistics)

    def statistics(self, part: Batch, samples: int, buffers: Mapping[str, Tensor] | None = None) -> Tensor:
        """Return what adds up over the parts of a batch: ``[1 + n]`` in float64 on the host, the number of samples first.

        Args:
            part: tensors on any one device, by the names or in the order of the example.
            buffers: of the model, for a loss that divides by class weights in a model that was captured on the meta device.
        """
        head = torch.tensor([float(samples)], dtype=torch.float64)
        if not self._statistics:
            return head
        inputs = dict(zip(self._example.names, self._example.values(part), strict=True))
        return torch.cat([head, self._at(inputs)._counted(inputs, samples, buffers)])

    def _at(self, inputs: Mapping[str, Tensor]) -> LossCounter:
        """Return what counts in inputs of these sizes. Raises DataError if a denominator is another function of its statistics there."""
        places = self._places(inputs) if self._may_hold_sizes else frozenset[_Place]()
        if {(name, dim) for name, dim, _ in places} <= {(name, dim) for name, dim, _ in self._indifferent}:
            return self
        return self._at_sizes.get(places, lambda: self._captured_at(places, inputs))

    def _captured_at(self, places: frozenset[_Place], inputs: Mapping[str, Tensor]) -> LossCounter:
        assert self._again is not None
        other = self._again(dict(inputs))
        if not isinstance(other, LossCounter) or other._form() != self._form():
            sizes = ", ".join(f"{name} {list(tensor.shape)}" for name, tensor in inputs.items())
            raise DataError(
                f"for inputs of the sizes {sizes} the loss is divided in another way than for the example: pad the batches to one "
                "length, or divide by a sum over the data, such as (labels != -100).sum()"
            )
        if other._of_batch.text == self._of_batch.text:
            self._indifferent |= places
            return self
        return other

    def _places(self, inputs: Mapping[str, Tensor]) -> frozenset[_Place]:
        """Return where sizes differ from those of the example, but for the batch."""
        return frozenset(
            (name, dim, size)
            for name, shape, follows in zip(
                self._example.names, self._example.shapes, self._example.follows, strict=True
            )
            for dim, size in enumerate(inputs[name].shape)
            if (dim or not follows) and (dim >= len(shape) or size != shape[dim])
        )

    def _form(self) -> tuple[object, ...]:
        """Return what of it the sizes of the inputs may not change."""
        return self.split, self._power, self.size, tuple(value.text for value in self._values)

    def _counted(self, inputs: Mapping[str, Tensor], samples: int, buffers: Mapping[str, Tensor] | None) -> Tensor:
        known = {**self._constants, **self._buffers, **(buffers or {})}
        return self._of_batch(inputs, known, samples)

    def statistics_of(self, batch: Batch, buffers: Mapping[str, Tensor] | None = None) -> Tensor:
        """The same for all that is in a batch."""
        return self.statistics(batch, self._example.size_of(batch), buffers)

    def weight(self, part: Tensor, whole: Tensor) -> float:
        """By what the loss of a part is multiplied to be its part of the loss of the whole, given the statistics of both.

        It is 0 for a part whose denominator is 0: such a part has no mean.
        """
        if self.split:
            return 1.0
        own, total = self._value(part), self._value(whole)
        return own / total if own and total else 0.0

    def divisors(self, whole: Tensor) -> dict[str, Tensor]:
        """Return what the graph of a split loss is given beside the batch; nothing for any other."""
        if not self.split:
            return {}
        values = [graph(whole) for graph in self._values]
        return {
            SAMPLES: whole[0].float(),
            **{
                f"{DIVISOR}{number}": value.reshape(d.shape).to(torch.float64 if d.double else torch.float32)
                for number, (d, value) in enumerate(zip(self._denominators, values, strict=True))
            },
        }

    def total(self, whole: Tensor) -> float:
        """Return what people see that the loss counts: its one denominator, else the samples."""
        one = not self.split and len(self._denominators) == 1
        return float(self._values[0](whole)) if one else float(whole[0])

    def is_defined(self, whole: Tensor) -> bool:
        """Return whether no denominator is 0: else one device would divide by it."""
        return all(bool((value != 0).all()) for value in (graph(whole) for graph in self._values))

    def _value(self, statistics: Tensor) -> float:
        value = float(statistics[0]) ** self._power if self._power else 1.0
        return math.prod((float(graph(statistics)) for graph in self._values), start=value)

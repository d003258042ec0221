"""Sums over layers: what a stage from any layer to any other takes on one kind of device, at a width and a micro-batch.

Alike devices share a table, so what this costs grows with the kinds of devices and not with their number.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from heterodyne.cost.layers import LayerCost, LayerCosts, Widths

__all__ = ["Memory", "Table", "Tables"]

Floats = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, slots=True)
class Memory:
    """Bytes of the fullest device of a stage. ``passing``: comes and goes inside a pass."""

    parameters: float
    gradients: float
    optimizer: float
    activations: float
    passing: float

    @property
    def total(self) -> float:
        return self.parameters + self.gradients + self.optimizer + self.activations + self.passing


@dataclass(frozen=True)
class Table:
    """Costs of stages on one kind of device. Layers are counted from 0; a stage is ``[start, stop)``."""

    costs: Sequence[LayerCost]
    widths: Widths
    _held: dict[tuple[int, float], tuple[Floats, Floats]] = field(default_factory=dict, repr=False, compare=False)

    def forward_s(self, start: int, stop: int) -> float:
        return self._forward[stop] - self._forward[start]

    def backward_s(self, start: int, stop: int, recompute: bool) -> float:
        """With the forward again if it is recomputed."""
        again = self.forward_s(start, stop) if recompute else 0.0
        return self._backward[stop] - self._backward[start] + again

    def update_s(self, start: int, stop: int) -> float:
        return self._update[stop] - self._update[start]

    def reduced_bytes(self, start: int, stop: int) -> float:
        """Gradients of whole layers: of one copy of what is no expert's, and of one set of the experts."""
        return self._reduced[stop] - self._reduced[start]

    def dense_bytes(self, start: int, stop: int) -> float:
        """Of these, those of all but the experts."""
        return self.reduced_bytes(start, stop) - self.expert_bytes(start, stop)

    def expert_bytes(self, start: int, stop: int) -> float:
        """And those of the experts."""
        return self._experts[stop] - self._experts[start]

    @cached_property
    def expert_width(self) -> int:
        """Devices of the stage over which one set of the experts lies; 0 where there are none."""
        own = [self.widths.devices // cost.expert_copies for cost in self.costs if cost.expert_bytes]
        return max(own, default=0)

    @property
    def may_stand_alone(self) -> bool:
        """Whether a pipeline of such stages is more than as many replicas of it, each with a part of the micro-batch."""
        return self.widths.data == 1 or self.expert_width > 0

    def output_bytes(self, stop: int) -> float:
        """What a stage that ends before layer ``stop`` sends."""
        return float(self.costs[stop - 1].output_bytes)

    def memory(self, start: int, stop: int, *, recompute: bool, held: int, shards: int) -> Memory:
        """``held``: micro-batches at the same time; ``shards``: parts of the optimizer state.

        A recomputed stage brings back one layer at a time.
        """
        kept = self._kept_again if recompute else self._kept
        own = self.costs[start:stop]
        passing = max(cost.workspace_bytes for cost in own)
        if recompute:
            passing += max(max(0, cost.kept_bytes - cost.kept_bytes_recomputed) for cost in own)
        return Memory(
            parameters=self._parameters[stop] - self._parameters[start],
            gradients=self._gradients[stop] - self._gradients[start],
            optimizer=(self._optimizer[stop] - self._optimizer[start]) / shards,
            activations=held * (kept[stop] - kept[start]),
            passing=float(passing),
        )

    def seconds(self, *, held: int, shards: int, memory_bytes: float, recompute: bool) -> Floats:
        """For every start and stop the forward and backward of a micro-batch; infinite where it does not fit.

        Recomputed where it does not fit otherwise and ``recompute`` allows it. Shape [layers + 1, layers + 1].
        """
        plain, again = self._square[:2]
        most, most_again = self._most_held(shards, memory_bytes)
        redone = np.where(held <= most_again, again, np.inf) if recompute else np.inf
        found: Floats = np.where(held <= most, plain, redone)
        return found

    def _most_held(self, shards: int, memory_bytes: float) -> tuple[Floats, Floats]:
        """Micro-batches for which there is memory in every stage, kept and recomputed; a search asks for many numbers of them in turn."""
        key = (shards, memory_bytes)
        if key not in self._held:
            _, _, fixed, optimizer, kept, kept_again = self._square
            room = memory_bytes - (fixed + optimizer / shards)
            self._held.clear()
            self._held[key] = (_times(room, kept), _times(room - self._redone, kept_again))
        return self._held[key]

    @cached_property
    def _forward(self) -> list[float]:
        return _sums([cost.forward_s for cost in self.costs])

    @cached_property
    def _backward(self) -> list[float]:
        return _sums([cost.backward_s for cost in self.costs])

    @cached_property
    def _update(self) -> list[float]:
        return _sums([cost.update_s for cost in self.costs])

    @cached_property
    def _parameters(self) -> list[float]:
        return _sums([cost.parameter_bytes for cost in self.costs])

    @cached_property
    def _gradients(self) -> list[float]:
        return _sums([cost.gradient_bytes for cost in self.costs])

    @cached_property
    def _optimizer(self) -> list[float]:
        return _sums([cost.optimizer_bytes for cost in self.costs])

    @cached_property
    def _kept(self) -> list[float]:
        return _sums([cost.kept_bytes for cost in self.costs])

    @cached_property
    def _kept_again(self) -> list[float]:
        return _sums([cost.kept_bytes_recomputed for cost in self.costs])

    @cached_property
    def _reduced(self) -> list[float]:
        return _sums(
            [self.widths.tensor * (_reduced(cost) - cost.expert_bytes) + self._of_set(cost) for cost in self.costs]
        )

    @cached_property
    def _experts(self) -> list[float]:
        return _sums([self._of_set(cost) for cost in self.costs])

    def _of_set(self, cost: LayerCost) -> float:
        return self.widths.devices / cost.expert_copies * cost.expert_bytes

    @cached_property
    def _redone(self) -> Floats:
        return _largest([max(0, cost.kept_bytes - cost.kept_bytes_recomputed) for cost in self.costs])

    @cached_property
    def _square(self) -> tuple[Floats, Floats, Floats, Floats, Floats, Floats]:
        forward, backward = _between(self._forward), _between(self._backward)
        count = len(self.costs) + 1
        stage = np.arange(count)[:, None] < np.arange(count)[None, :]
        plain = np.where(stage, forward + backward, np.inf)
        fixed = _between(self._parameters) + _between(self._gradients)
        fixed = fixed + _largest([cost.workspace_bytes for cost in self.costs])
        kept, kept_again = _between(self._kept), _between(self._kept_again)
        return plain, plain + forward, fixed, _between(self._optimizer), kept, kept_again


@dataclass(frozen=True)
class Tables:
    """The tables of a model, made when they are asked for."""

    costs: LayerCosts
    _known: dict[tuple[str, Widths, int], Table | None] = field(default_factory=dict, repr=False)

    def table(self, kind: str, widths: Widths, micro_batch: int) -> Table | None:
        """None where the cost of some layer is not known."""
        key = (kind, widths, micro_batch)
        if key not in self._known:
            by_layer = {layer: self.costs.cost(kind, layer, widths, micro_batch) for layer in set(self.costs.layers)}
            own = [by_layer[layer] for layer in self.costs.layers]
            known = [cost for cost in own if cost is not None]
            self._known[key] = Table(known, widths) if len(known) == len(own) else None
        return self._known[key]


def _times(room: Floats, each: Floats) -> Floats:
    """How often something goes into a room; negative where there is none."""
    with np.errstate(divide="ignore", invalid="ignore"):
        found: Floats = np.where(each > 0, np.floor(room / each), np.where(room >= 0, np.inf, -1.0)).astype(np.float32)
    return found


def _reduced(cost: LayerCost) -> int:
    return cost.gradient_bytes if cost.reduced_bytes is None else cost.reduced_bytes


def _sums(values: Sequence[float]) -> list[float]:
    return list(accumulate(values, initial=0.0))


def _between(sums: Sequence[float]) -> Floats:
    row = np.asarray(sums)
    difference: Floats = row[None, :] - row[:, None]
    return difference


def _largest(values: Sequence[float]) -> Floats:
    """For every start and stop the largest value between them."""
    count = len(values)
    square = np.where(np.arange(count)[:, None] <= np.arange(count)[None, :], np.asarray(values, float)[None, :], 0.0)
    found = np.zeros((count + 1, count + 1))
    found[:count, 1:] = np.maximum.accumulate(square, axis=1)
    return found

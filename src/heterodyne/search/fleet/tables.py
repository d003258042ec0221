"""Sums over layers: what a stage from any layer to any other takes on one kind of device, at a width and a micro-batch.

Alike devices share a table, so what this costs grows with the kinds of devices and not with their number.

State is shared by level (ZeRO, Rajbhandari et al., SC 2020): from 1 on the optimizer's, from 2 on gradients, at 3 parameters, over all
devices that hold the same parameters: R pipelines times the copies in a stage; of experts a stage has one copy. With e the part of a
layer that is experts', a device of R pipelines of c copies keeps (1 - e) / (R c) + e / R of it: a sum over layers over R.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, pairwise
from math import inf
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from heterodyne.cost.layers import LayerCost, LayerCosts, Widths

__all__ = ["Carried", "Exchanged", "Memory", "Rates", "Table", "Tables"]

Exchanged = Literal["gradients", "updated", "parameters"]
"""What replicas exchange: gradients, the parameters that an optimizer has changed, all parameters."""
Floats = NDArray[np.float64]
Rates = tuple[float, float]
"""Seconds for a byte that a device sends inside its node, and for one that a node sends."""


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


class Carried(NamedTuple):
    """Bytes that a ring through all replicas takes once round: of each device of a stage, and of all of them where they leave a node."""

    device: float
    node: float


@dataclass(frozen=True)
class Table:
    """Costs of stages on one kind of device. Layers are counted from 0; a stage is ``[start, stop)``."""

    costs: Sequence[LayerCost]
    widths: Widths
    _levels: dict[tuple[int, int, tuple[int, Rates], float], tuple[Floats, ...]] = field(
        default_factory=dict, repr=False, compare=False
    )

    def forward_s(self, start: int, stop: int) -> float:
        return self._forward[stop] - self._forward[start]

    def backward_s(self, start: int, stop: int, recompute: bool) -> float:
        """With the forward again if it is recomputed."""
        again = self.forward_s(start, stop) if recompute else 0.0
        return self._backward[stop] - self._backward[start] + again

    def update_s(self, start: int, stop: int, *, replicas: int = 1, zero: int = 0) -> float:
        """Of what a device updates: all of its parameters, or from level 1 on its share."""
        if zero < 1:
            return self._update[stop] - self._update[start]
        return (self._update_shared[stop] - self._update_shared[start]) / replicas

    def reduced_bytes(self, start: int, stop: int) -> float:
        """Gradients of whole layers, over all devices of the stage."""
        whole = self._whole["gradients"].whole
        return whole[stop] - whole[start]

    def carried(self, what: Exchanged, start: int, stop: int, replicas: int) -> Carried:
        """Of one reduce-scatter or all-gather over the replicas of some layers; an all-reduce is two (Patarasuk and Yuan, 2009).

        (n - 1) / n of the bytes, n the devices that hold the same: none where it is one.
        """
        own = self._whole[what]
        return Carried(
            own.device[stop] - own.device[start] - (own.kept[stop] - own.kept[start]) / replicas,
            own.whole[stop] - own.whole[start] - (own.once[stop] - own.once[start]) / replicas,
        )

    def output_bytes(self, stop: int) -> float:
        """What a stage that ends before layer ``stop`` sends."""
        return float(self.costs[stop - 1].output_bytes)

    def memory(self, start: int, stop: int, *, recompute: bool, held: int, replicas: int = 1, zero: int = 0) -> Memory:
        """``held``: micro-batches at the same time; ``replicas``: pipelines that share state at a level ``zero``.

        A recomputed stage brings back one layer at a time. Whole gradients (from level 2) and parameters (level 3) come and go with
        the layer that is computed and its neighbour, whose exchange goes on meanwhile.
        """
        zero = zero if replicas * self.widths.copies > 1 else 0
        kept = self._kept_again if recompute else self._kept
        own = self.costs[start:stop]
        passing = float(max(cost.workspace_bytes for cost in own))
        if recompute:
            passing += max(max(0, cost.kept_bytes - cost.kept_bytes_recomputed) for cost in own)
        if zero > 1:
            passing += max(_pairs([_gathered(cost, zero) for cost in own]))
        parameters, gradients, optimizer = (
            (sums.shared[stop] - sums.shared[start]) / replicas
            if zero >= level
            else sums.whole[stop] - sums.whole[start]
            for sums, level in ((self._parameters, 3), (self._gradients, 2), (self._optimizer, 1))
        )
        return Memory(
            parameters=parameters,
            gradients=gradients,
            optimizer=optimizer,
            activations=held * (kept[stop] - kept[start]),
            passing=passing,
        )

    def seconds(
        self,
        *,
        held: int,
        memory_bytes: float,
        recompute: bool,
        replicas: int = 1,
        zero: int = 0,
        exchange: tuple[int, Rates] = (1, (0.0, 0.0)),
    ) -> Floats:
        """For every start and stop the forward and backward of a micro-batch; infinite where it does not fit.

        Recomputed where it does not fit otherwise and ``recompute`` allows it. A pass takes no less than the ``exchange`` beside it
        among so many pipelines at some rates, whichever way is shorter. Shape [layers + 1, layers + 1].
        """
        plain_s, again_s, plain, again = self._at_level(
            zero if replicas * self.widths.copies > 1 else 0, replicas, exchange, memory_bytes
        )
        return np.where(held <= plain, plain_s, np.where(held <= again, again_s, np.inf) if recompute else np.inf)

    def _at_level(
        self, zero: int, replicas: int, exchange: tuple[int, Rates], memory_bytes: float
    ) -> tuple[Floats, ...]:
        """For every start and stop, without recompute and with it: seconds, and micro-batches that there is room for at the same time."""
        key = (zero, replicas, exchange, memory_bytes)
        if key not in self._levels:
            gather, scatter = self._exchanged_s(zero, *exchange)
            forward, backward = self._passes
            ahead = np.maximum(forward, gather)
            room = memory_bytes - self._fixed_bytes(zero, replicas)
            self._levels[key] = (
                ahead + np.maximum(backward, scatter),
                ahead + np.maximum(backward + forward, scatter),
                _whole_in(room, _between(self._kept)),
                _whole_in(room - self._redone, _between(self._kept_again)),
            )
        return self._levels[key]

    def _fixed_bytes(self, zero: int, replicas: int) -> Floats:
        fixed = self._working
        if zero > 1:
            fixed = fixed + self._passing[zero]
        for sums, level in ((self._parameters, 3), (self._gradients, 2), (self._optimizer, 1)):
            fixed = fixed + (sums.shared_square / replicas if zero >= level else sums.square)
        return fixed

    def _exchanged_s(self, zero: int, replicas: int, rates: Rates) -> tuple[Floats | float, Floats | float]:
        """Beside a forward and beside a backward, for every start and stop."""
        if zero < 2 or rates == (0.0, 0.0):
            return 0.0, 0.0
        gradients = self._whole["gradients"].least_s(replicas, rates)
        if zero == 2:
            return 0.0, gradients
        parameters = self._whole["parameters"].least_s(replicas, rates)
        return parameters, gradients + parameters

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
    def _update_shared(self) -> list[float]:
        return _sums([part * cost.update_s for cost, part in zip(self.costs, self._parts, strict=True)])

    @cached_property
    def _parts(self) -> list[float]:
        """Of each layer the part that a device keeps of what its stage shares."""
        copies = self.widths.copies
        return [(1 - expert) / copies + expert for expert in map(_expert, self.costs)]

    @cached_property
    def _parameters(self) -> _State:
        return _State([cost.parameter_bytes for cost in self.costs], self._parts)

    @cached_property
    def _gradients(self) -> _State:
        return _State([cost.gradient_bytes for cost in self.costs], self._parts)

    @cached_property
    def _optimizer(self) -> _State:
        return _State([cost.optimizer_bytes for cost in self.costs], self._parts)

    @cached_property
    def _whole(self) -> dict[Exchanged, _Sent]:
        experts = [_expert(cost) for cost in self.costs]
        return {
            "gradients": _Sent([_reduced(cost) for cost in self.costs], experts, self.widths),
            # What is frozen is not updated.
            "updated": _Sent([min(c.parameter_bytes, c.gradient_bytes) for c in self.costs], experts, self.widths),
            "parameters": _Sent([cost.parameter_bytes for cost in self.costs], experts, self.widths),
        }

    @cached_property
    def _kept(self) -> list[float]:
        return _sums([cost.kept_bytes for cost in self.costs])

    @cached_property
    def _kept_again(self) -> list[float]:
        return _sums([cost.kept_bytes_recomputed for cost in self.costs])

    @cached_property
    def _redone(self) -> Floats:
        return _largest([max(0, cost.kept_bytes - cost.kept_bytes_recomputed) for cost in self.costs])

    @cached_property
    def _working(self) -> Floats:
        return _largest([cost.workspace_bytes for cost in self.costs])

    @cached_property
    def _passing(self) -> dict[int, Floats]:
        """By level, of the two neighbours of a stage that take most."""
        count = len(self.costs) + 1
        found = {}
        for zero in (2, 3):
            own = [_gathered(cost, zero) for cost in self.costs]
            both = np.zeros((count, count))
            both[:-1, 2:] = _largest(_pairs(own))[:, 1:] if len(own) > 1 else 0.0
            found[zero] = np.maximum(both, _largest(own))
        return found

    @cached_property
    def _passes(self) -> tuple[Floats, Floats]:
        count = len(self.costs) + 1
        stage = np.arange(count)[:, None] < np.arange(count)[None, :]
        return np.where(stage, _between(self._forward), np.inf), _between(self._backward)


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


class _State:
    """Bytes of state of a device, whole and in its share of one pipeline, summed over layers."""

    def __init__(self, values: Sequence[float], parts: Sequence[float]) -> None:
        self.whole = _sums(values)
        self.shared = _sums([part * value for part, value in zip(parts, values, strict=True)])

    @cached_property
    def square(self) -> Floats:
        return _between(self.whole)

    @cached_property
    def shared_square(self) -> Floats:
        return _between(self.shared)


class _Sent:
    """Bytes that are exchanged, summed over layers.

    Of a device: all (``device``), and what it has of them in the end if there is one pipeline (``kept``). Of all devices of a stage:
    every byte once (``whole``), and ``once``, what of that a ring of one pipeline need not pass on.
    """

    def __init__(self, values: Sequence[float], experts: Sequence[float], widths: Widths) -> None:
        plain = [value * (1 - expert) for value, expert in zip(values, experts, strict=True)]
        routed = [value * expert for value, expert in zip(values, experts, strict=True)]
        copies, tensor, devices = widths.copies, widths.tensor, widths.devices
        both = list(zip(plain, routed, strict=True))
        self.device = _sums([a + b for a, b in both])
        self.kept = _sums([a / copies + b for a, b in both])
        self.whole = _sums([tensor * a + devices * b for a, b in both])
        self.once = _sums([tensor * a / copies + devices * b for a, b in both])

    def least_s(self, replicas: int, rates: Rates) -> Floats:
        """Of one way round, for every start and stop: inside a node or between nodes, whichever is sooner."""
        device, kept, whole, once = self._squares
        inside, between = rates
        ways = []
        if inside < inf:
            ways.append(inside * (device - kept / replicas))
        if between < inf:
            ways.append(between * (whole - once / replicas))
        return np.minimum.reduce(ways) if ways else np.full_like(device, np.inf)

    @cached_property
    def _squares(self) -> tuple[Floats, Floats, Floats, Floats]:
        return _between(self.device), _between(self.kept), _between(self.whole), _between(self.once)


def _reduced(cost: LayerCost) -> float:
    return float(cost.gradient_bytes if cost.reduced_bytes is None else cost.reduced_bytes)


def _expert(cost: LayerCost) -> float:
    """The part of a layer that belongs to experts."""
    reduced = _reduced(cost)
    return cost.expert_bytes / reduced if reduced else 0.0


def _gathered(cost: LayerCost, zero: int) -> float:
    """What of a layer is whole only while it is worked on."""
    return float(cost.gradient_bytes + (cost.parameter_bytes if zero > 2 else 0))


def _pairs(values: Sequence[float]) -> list[float]:
    """Of neighbours together; of a single one, itself."""
    return [a + b for a, b in pairwise(values)] or list(values)


def _sums(values: Sequence[float]) -> list[float]:
    return list(accumulate(values, initial=0.0))


def _between(sums: Sequence[float]) -> Floats:
    row = np.asarray(sums)
    difference: Floats = row[None, :] - row[:, None]
    return difference


def _whole_in(room: Floats, each: Floats) -> Floats:
    """How often something goes into a room, in fractions; -1 where the room is less than none."""
    with np.errstate(divide="ignore", invalid="ignore"):
        found: Floats = np.where(room < 0, -1.0, np.where(each > 0, room / each, np.inf))
    return found


def _largest(values: Sequence[float]) -> Floats:
    """For every start and stop the largest value between them."""
    count = len(values)
    square = np.where(np.arange(count)[:, None] <= np.arange(count)[None, :], np.asarray(values, float)[None, :], 0.0)
    found = np.zeros((count + 1, count + 1))
    found[:count, 1:] = np.maximum.accumulate(square, axis=1)
    return found

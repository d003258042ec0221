"""Prefix sums over layers: the cost of a stage from any layer to any other on one device kind, at some widths and micro-batch size.

Alike devices share a table, so its size grows with device kinds and not with devices.

ZeRO (Rajbhandari et al., SC 2020): from level 1 on the optimizer state, from 2 on gradients, at 3 parameters are sharded over all
devices that hold the same parameters: R pipelines times the copies in a stage, c of all and d of experts. With e the expert fraction of
a layer, a device keeps (1 - e) / (R c) + e / (R d) of it: a prefix sum divided by R.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Literal, NamedTuple, get_args

import numpy as np

from heterodyne.cost.layers import LayerCost, LayerCosts, Widths
from heterodyne.search.fleet.arrays import Floats, Ints, between, largest, sums

__all__ = ["EXCHANGED", "CommVolume", "Exchanged", "LayerBytes", "Memory", "Rates", "Table", "Tables", "expert_part"]

Exchanged = Literal["gradients", "updated", "parameters"]
"""What replicas exchange: gradients, the parameters that an optimizer has changed, all parameters."""
EXCHANGED: tuple[Exchanged, ...] = get_args(Exchanged)
Rates = tuple[float, float]
"""Seconds for a byte that a device sends inside its node, and for one that a node sends."""


class CommVolume(NamedTuple):
    """Bytes that replicas of stages communicate, and what of that a ring inside one pipeline need not send, since it stays on its device.

    Along the first axis: per device of a stage, per copy of all its layers (which leaves the node), and per set of its experts, which
    may span nodes and is not part of the copy.
    """

    whole: Floats
    kept: Floats

    def carried(self, replicas: int) -> Floats:
        """Bytes of one ring pass through all replicas: a reduce-scatter or an all-gather; an all-reduce is two (Patarasuk and Yuan, 2009).

        (n - 1) / n of the bytes for n holders: none for one.
        """
        return self.whole - self.kept / replicas


class LayerBytes:
    """Communicated bytes of one kind, as prefix sums over layers."""

    def __init__(self, values: Sequence[float], costs: Sequence[LayerCost], widths: Widths) -> None:
        experts = [expert_part(cost) for cost in costs]
        routed = [value * expert for value, expert in zip(values, experts, strict=True)]
        plain = [value - own for value, own in zip(values, routed, strict=True)]
        sets = [own * widths.devices / cost.expert_copies for own, cost in zip(routed, costs, strict=True)]
        kept = [own / cost.expert_copies for own, cost in zip(routed, costs, strict=True)]
        self.sums = CommVolume(
            whole=np.array([sums(values), sums([widths.tensor * a for a in plain]), sums(sets)]),
            kept=np.array(
                [
                    sums([a / widths.copies + b for a, b in zip(plain, kept, strict=True)]),
                    sums([widths.tensor * a / widths.copies for a in plain]),
                    sums([own / cost.expert_copies for own, cost in zip(sets, costs, strict=True)]),
                ]
            ),
        )
        """Of the first layers. Shape [3, layers + 1]."""


def expert_part(cost: LayerCost) -> float:
    """The fraction of a layer's bytes that belongs to experts."""
    return cost.expert_bytes / cost.gradient_bytes if cost.gradient_bytes else 0.0


class Memory(NamedTuple):
    """Bytes of the fullest device of a stage. ``passing``: workspace inside a pass."""

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

    def forward_s(self, start: int, stop: int) -> float:
        return self._forward[stop] - self._forward[start]

    def backward_s(self, start: int, stop: int, recompute: bool) -> float:
        """With what is computed again if it is recomputed."""
        return self._backward[stop] - self._backward[start] + (self.recompute_s(start, stop) if recompute else 0.0)

    def recompute_s(self, start: int, stop: int) -> float:
        return self._recompute[stop] - self._recompute[start]

    def updates_s(self, starts: Ints, stops: Ints) -> Floats:
        """Of what a device of each stage updates, were all pipelines one: all of its parameters, and its share. Shape [2, stages]."""
        found: Floats = self._update[:, stops] - self._update[:, starts]
        return found - self._counted_twice(self._update, starts, stops)

    def reduced_bytes(self, start: int, stop: int) -> float:
        """Gradients of whole layers: of one copy of what is no expert's, and of one set of the experts."""
        _, *own = self._whole["gradients"].sums.whole
        return sum(float(rows[stop] - rows[start]) for rows in own)

    def sent(self, starts: Ints, stops: Ints) -> CommVolume:
        """Communication volume of stages from some layers to others, of all that is `EXCHANGED`. Shapes [3, 3, stages]."""
        found = self._sent[..., stops] - self._sent[..., starts]
        whole, kept = found - self._counted_twice(self._sent, starts, stops)
        return CommVolume(whole, kept)

    def tied_bytes(self, start: int, stop: int) -> float:
        """Gradients of parameters that layers inside and outside of a stage may share, one copy of them; 0 where it has none."""
        own = (self.costs[layer].tied_bytes for layer in self._tied if start <= layer < stop)
        return float(self.widths.tensor * max(own, default=0))

    @cached_property
    def _tied(self) -> list[int]:
        return [layer for layer, cost in enumerate(self.costs) if cost.tied_bytes]

    def _counted_twice(self, sums: Floats, starts: Ints, stops: Ints) -> Floats:
        """Of sums over layers, what a stage that has the first and the last of the layers with tied parameters would count twice."""
        if len(self._tied) < 2:
            return np.zeros(1)
        first, last = self._tied[0], self._tied[-1]
        each = (sums[..., last + 1] - sums[..., last]) * self._tied_part
        found: Floats = each[..., None] * ((starts <= first) & (stops > last))
        return found

    @cached_property
    def _tied_part(self) -> float:
        """Of the last layer with tied parameters, the part that they are."""
        cost = self.costs[self._tied[-1]]
        return cost.tied_bytes / cost.gradient_bytes

    @cached_property
    def expert_width(self) -> int:
        """Devices of the stage over which one set of the experts is sharded; 0 where there are none."""
        own = [self.widths.devices // cost.expert_copies for cost in self.costs if cost.expert_bytes]
        return max(own, default=0)

    @property
    def may_stand_alone(self) -> bool:
        """Whether a pipeline of such stages is more than as many replicas of it, each with a part of the micro-batch."""
        return self.widths.data == 1 or self.expert_width > 0

    def output_bytes(self, stop: int) -> float:
        """What a stage that ends before layer ``stop`` sends."""
        return float(self.costs[stop - 1].output_bytes)

    def memory(self, start: int, stop: int, *, recompute: bool, held: int, replicas: int = 1, zero: int = 0) -> Memory:
        """``held``: micro-batches in flight; ``replicas``: pipelines that shard state at ZeRO level ``zero``.

        A recomputed stage restores one layer at a time. Unsharded gradients (from level 2) and parameters (level 3) exist for the
        current layer and its neighbour, whose collective runs meanwhile.
        """
        zero = zero if replicas * self.widths.copies > 1 else 0
        kept = self._kept_again if recompute else self._kept
        passing = float((self._working_again if recompute else self._working)[start, stop])
        if zero > 1:
            passing += float(self._passing[zero][start, stop])
        both = len(self._tied) > 1 and start <= self._tied[0] and stop > self._tied[-1]
        parameters, gradients, optimizer = (
            (own.shared[stop] - own.shared[start] - both * own.tied_shared) / replicas
            if zero >= level
            else own.whole[stop] - own.whole[start] - both * own.tied
            for own, level in ((self._parameters, 3), (self._gradients, 2), (self._optimizer, 1))
        )
        return Memory(
            parameters=parameters,
            gradients=gradients,
            optimizer=optimizer,
            activations=held * (kept[stop] - kept[start]),
            passing=passing,
        )

    @property
    def passes(self) -> tuple[Floats, Floats, Floats]:
        """Forward, backward and recompute of the first layers. Shape [layers + 1]."""
        return np.array(self._forward), np.array(self._backward), np.array(self._recompute)

    def most_held(self, zero: int, replicas: int, memory_bytes: float, *, recompute: bool) -> Floats:
        """For every start and stop the largest number of micro-batches in flight; negative where the stage itself does not fit."""
        room = memory_bytes - self._fixed_bytes(zero, replicas, recompute=recompute)
        each = between(self._kept_again if recompute else self._kept)
        with np.errstate(divide="ignore", invalid="ignore"):
            found: Floats = np.where(each > 0, np.floor(room / each), np.where(room >= 0, np.inf, -1.0))
        return found

    def _fixed_bytes(self, zero: int, replicas: int, *, recompute: bool) -> Floats:
        fixed, tied = np.zeros(len(self.costs) + 1), 0.0
        for own, level in ((self._parameters, 3), (self._gradients, 2), (self._optimizer, 1)):
            fixed += np.array(own.shared) / replicas if zero >= level else np.array(own.whole)
            tied += own.tied_shared / replicas if zero >= level else own.tied
        beside = self._working_again if recompute else self._working
        if zero > 1:
            beside = beside + self._passing[zero]
        found: Floats = fixed[None, :] - fixed[:, None] + beside
        if len(self._tied) > 1:
            found[: self._tied[0] + 1, self._tied[-1] + 1 :] -= tied
        return found

    @cached_property
    def _forward(self) -> list[float]:
        return sums([cost.forward_s for cost in self.costs])

    @cached_property
    def _backward(self) -> list[float]:
        return sums([cost.backward_s for cost in self.costs])

    @cached_property
    def _recompute(self) -> list[float]:
        return sums([cost.recompute_s for cost in self.costs])

    @cached_property
    def _update(self) -> Floats:
        whole = [cost.update_s for cost in self.costs]
        return np.array([sums(whole), sums([part * own for part, own in zip(self._parts, whole, strict=True)])])

    @cached_property
    def _parts(self) -> list[float]:
        """Of each layer the part that a device keeps of what its stage shares."""
        copies = self.widths.copies
        return [
            (1 - expert) / copies + expert / cost.expert_copies
            for cost, expert in zip(self.costs, map(expert_part, self.costs), strict=True)
        ]

    @cached_property
    def _parameters(self) -> _State:
        return self._state([cost.parameter_bytes for cost in self.costs])

    @cached_property
    def _gradients(self) -> _State:
        return self._state([cost.gradient_bytes for cost in self.costs])

    @cached_property
    def _optimizer(self) -> _State:
        return self._state([cost.optimizer_bytes for cost in self.costs])

    def _state(self, values: Sequence[float]) -> _State:
        tied = values[self._tied[-1]] * self._tied_part if self._tied else 0.0
        shared = [part * value for part, value in zip(self._parts, values, strict=True)]
        return _State(sums(values), sums(shared), tied, tied / self.widths.copies)

    @cached_property
    def _whole(self) -> dict[Exchanged, LayerBytes]:
        sizes: dict[Exchanged, list[float]] = {
            "gradients": [cost.gradient_bytes for cost in self.costs],
            # What is frozen is not updated.
            "updated": [min(cost.parameter_bytes, cost.gradient_bytes) for cost in self.costs],
            "parameters": [cost.parameter_bytes for cost in self.costs],
        }
        return {what: LayerBytes(own, self.costs, self.widths) for what, own in sizes.items()}

    @cached_property
    def _sent(self) -> Floats:
        """See `CommVolume`: whole and kept, of all that is `EXCHANGED`, of the first layers. Shape [2, 3, 3, layers + 1]."""
        return np.array([self._whole[what].sums for what in EXCHANGED]).transpose(1, 2, 0, 3)

    @cached_property
    def _kept(self) -> list[float]:
        return sums([cost.kept_bytes for cost in self.costs])

    @cached_property
    def _kept_again(self) -> list[float]:
        return sums([min(cost.kept_bytes, cost.kept_bytes_recomputed) for cost in self.costs])

    @cached_property
    def _working(self) -> Floats:
        return largest([cost.workspace_bytes for cost in self.costs])

    @cached_property
    def _working_again(self) -> Floats:
        """With what recompute brings back of the layer."""
        again = [max(0, cost.kept_bytes - cost.kept_bytes_recomputed) for cost in self.costs]
        return largest([own + cost.workspace_bytes for own, cost in zip(again, self.costs, strict=True)])

    @cached_property
    def _passing(self) -> dict[int, Floats]:
        """By level, of the two neighbours of a stage that take most."""
        count = len(self.costs) + 1
        found = {}
        for zero in (2, 3):
            own = [_gathered(cost, zero) for cost in self.costs]
            both = np.zeros((count, count))
            both[:-1, 2:] = largest(_pairs(own))[:, 1:] if len(own) > 1 else 0.0
            found[zero] = np.maximum(both, largest(own))
        return found


@dataclass(frozen=True)
class Tables:
    """The cost tables of a model, made on demand."""

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


class _State(NamedTuple):
    """Bytes of state of a device, whole and in its share of one pipeline, summed over layers.

    ``tied``, ``tied_shared``: of those, what a stage with both ends of tied parameters would count twice.
    """

    whole: list[float]
    shared: list[float]
    tied: float
    tied_shared: float


def _gathered(cost: LayerCost, zero: int) -> float:
    """What of a layer is whole only while it is worked on."""
    return float(cost.gradient_bytes + (cost.parameter_bytes if zero > 2 else 0))


def _pairs(values: Sequence[float]) -> list[float]:
    """Of neighbours together; of a single one, itself."""
    return [a + b for a, b in pairwise(values)] or list(values)

"""Seconds of a stage from any layer to any other on some stage kinds, where it fits in memory.

Costs are differences of prefix sums over layers, and memory grows with layers. So for each first layer the last one that fits is enough,
and no table of all starts and stops is kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

import numpy as np
from numpy.typing import NDArray

from heterodyne.search.fleet.arrays import Floats, Ints
from heterodyne.search.fleet.comm_volume import Exchanged
from heterodyne.search.fleet.kinds import Kind
from heterodyne.search.fleet.network import Network

__all__ = ["Sharing", "StageCosts", "Stages"]

_NOWHERE = 1e200  # seconds of a byte that nothing carries; of no bytes it makes none


@dataclass(frozen=True, kw_only=True)
class Sharing:
    """How state is sharded: over how many pipelines, at which ZeRO levels; each stage at the best of them.

    With several levels this is a relaxation: a plan has one for all stages.

    Args:
        replicas: pipelines that shard the state.
        zero: ZeRO levels.
        least: the least number of pipelines, for the traffic in passes; None: two, where a stage has no copies.
        network: gives the least seconds of that traffic; None: it takes none.
    """

    replicas: int = 1
    zero: tuple[int, ...] = (0,)
    least: int | None = None
    network: Network | None = None

    def fits(self, kind: Kind, start: int, stop: int, held: int) -> bool:
        """Whether a stage does at some level without recompute."""
        return any(
            kind.table.memory(start, stop, recompute=False, held=held, replicas=self.replicas, zero=zero).total
            <= kind.memory_bytes
            for zero in self.zero
        )

    def level(self, kind: Kind, zero: int) -> int:
        """Nothing is shared where there is one replica."""
        return zero if self.replicas * kind.widths.copies > 1 else 0

    def replicas_of(self, kind: Kind) -> int:
        """Pipelines that exchange beside passes, at least."""
        return (2 if kind.widths.copies == 1 else 1) if self.least is None else self.least


class StageCosts:
    """Costs of some stage kinds that shard state.

    Args:
        held: the largest number of micro-batches in flight.
        recompute: whether stages that do not fit may be recomputed.
    """

    def __init__(self, kinds: Sequence[Kind], sharing: Sharing, *, held: int, recompute: bool) -> None:
        self.layers = len(kinds[0].table.costs)
        passes = zip(*(kind.table.passes for kind in kinds), strict=True)
        self.forward, self.backward, self.recompute = (np.concatenate(own) for own in passes)
        self.plain = self.forward + self.backward
        self.again = self.plain + self.recompute
        self.levels = [_Level(kinds, sharing, zero, held, recompute) for zero in sharing.zero]

    def of(self, kind: Ints, held: Ints | int, start: Ints) -> Stages:
        """Stages by kind, micro-batches in flight and first layer; the three broadcast to one shape."""
        return Stages(self, kind, held, start)


class Stages:
    """Stages with given first layers."""

    def __init__(self, costs: StageCosts, kind: Ints, held: Ints | int, start: Ints) -> None:
        self._costs, self._kind, self._start = costs, kind, start
        self._base = kind * (costs.layers + 1)
        self._at = at = self._base + start
        self._from = costs.plain[at], costs.again[at]
        self._last = [(level.last[held, at], level.last_again[held, at]) for level in costs.levels]

    def until(self, stop: Ints) -> Floats:
        """Seconds per micro-batch of stages that end before a layer; infinite where they do not fit."""
        to = self._base + stop
        found: Floats | None = None
        for level, (last, last_again) in zip(self._costs.levels, self._last, strict=True):
            plain, again = self._plain(to) if level.exchanged is None else self._exchanged(level, to)
            own: Floats = np.where(stop <= last, plain, np.where(stop <= last_again, again, np.inf))
            found = own if found is None else np.minimum(found, own)
        assert found is not None
        return found

    def _plain(self, to: Ints) -> tuple[Floats, Floats]:
        plain, again = self._from
        return self._costs.plain[to] - plain, self._costs.again[to] - again

    def _exchanged(self, level: _Level, to: Ints) -> tuple[Floats, Floats]:
        """Passes take no less than what is exchanged beside them, inside a node or between nodes, whichever is sooner."""
        costs, at = self._costs, self._at
        forward, backward, again = (own[to] - own[at] for own in (costs.forward, costs.backward, costs.recompute))
        assert level.exchanged is not None
        inside, outside = level.rates
        seconds = []
        for device, dense in level.exchanged:
            own = device[to] - device[at]
            beyond = np.maximum(dense[to] - dense[at], own)
            seconds.append(np.minimum(inside[self._kind] * own, outside[self._kind] * beyond))
        behind = seconds[0] + (seconds[1] if len(seconds) > 1 else 0.0)
        ahead = np.maximum(forward, seconds[1]) if len(seconds) > 1 else forward
        return ahead + np.maximum(backward, behind), ahead + np.maximum(backward + again, behind)


class _Level:
    """Of state sharding: up to which layers stages fit, and what they exchange beside passes.

    Attributes:
        last, last_again: by micro-batches held at the same time, kind and first layer. Shape [held + 1, kinds x (layers + 1)].
        exchanged: bytes of a device and of a copy, summed over layers: of gradients, and at level 3 of parameters too; None: nothing.
        rates: seconds of a byte inside a node and between nodes. Shape [kinds].
    """

    def __init__(self, kinds: Sequence[Kind], sharing: Sharing, zero: int, held: int, recompute: bool) -> None:
        both = [_last(kind, sharing, zero, held, recompute) for kind in kinds]
        self.last, self.last_again = (np.concatenate(own, axis=1) for own in zip(*both, strict=True))
        self.exchanged: list[tuple[Floats, Floats]] | None = None
        self.rates = np.zeros(len(kinds)), np.zeros(len(kinds))
        if zero > 1 and sharing.network is not None:
            self._exchange(kinds, sharing, zero, sharing.network)

    def _exchange(self, kinds: Sequence[Kind], sharing: Sharing, zero: int, network: Network) -> None:
        for number, kind in enumerate(kinds):
            if sharing.level(kind, zero):
                own = network.least_s_per_byte(kind.name, kind.widths, sharing.replicas_of(kind))
                self.rates[0][number], self.rates[1][number] = (_NOWHERE if rate == inf else rate for rate in own)
        whats: list[Exchanged] = ["gradients", "parameters"] if zero > 2 else ["gradients"]
        self.exchanged = []
        for what in whats:
            sums = [kind.table.exchanged(what).carried(sharing.replicas_of(kind)) for kind in kinds]
            device, dense, _ = np.concatenate(sums, axis=1)
            self.exchanged.append((device, dense))


def _last(kind: Kind, sharing: Sharing, zero: int, held: int, recompute: bool) -> tuple[NDArray[np.int16], ...]:
    """By micro-batches held at the same time and first layer, before which layer a stage has to end; the same recomputed."""
    table, level = kind.table, sharing.level(kind, zero)
    plain = _ends(table.most_held(level, sharing.replicas, kind.memory_bytes, recompute=False), held)
    if not recompute:
        return plain, plain
    return plain, _ends(table.most_held(level, sharing.replicas, kind.memory_bytes, recompute=True), held)


def _ends(most: Floats, held: int) -> NDArray[np.int16]:
    """``most``: micro-batches for which each stage has room, the fewer the longer it is. Shape [layers + 1, layers + 1]."""
    count = len(most)
    start, stop = np.triu_indices(count, 1)
    own = np.clip(most[start, stop], 0, held).astype(np.int64)
    number = np.bincount(start * (held + 1) + own, minlength=count * (held + 1)).reshape(count, held + 1)
    longer = np.cumsum(number[:, ::-1], axis=1)[:, ::-1]
    found: NDArray[np.int16] = (longer.T + np.arange(count)).astype(np.int16)
    return found

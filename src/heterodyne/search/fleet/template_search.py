"""Template search: which devices, widths and numbers of stages make a good pipeline, by dynamic programming over sets of pools.

Fix the number of replicas R and the time tau of the bottleneck stage. A pool of N devices has N // R for each pipeline, which make n stages
of a width. The stage at position p from the end of the pipeline has p micro-batches in flight (1F1B), so it holds as many layers as it does
in tau and as it has memory for: x(p). A pool that comes ahead of p stages of other pools adds x(p + 1) + ... + x(p + n) layers to theirs,
whichever those are. So the most layers in p stages of a set of pools follow from those of the sets with a pool less, over all orders of the
pools; at a fixed tau pools are independent of each other, and there is no product over widths or orders.

All R and tau are one axis of the arrays ("row"). Layers are counted, each like the mean of the model: what is found is estimated again, cut
exactly and played.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from heterodyne.search.fleet.arrays import Floats, Ints
from heterodyne.search.fleet.kinds import Kind

__all__ = ["NO_TIME_S", "TIMES", "Room", "Runs", "TemplateSearch"]

TIMES = 8
"""Bottleneck times for each number of replicas."""
_LATER = 1.2  # each over the one before: coarse, since what is found is estimated again
_LESS = (0, 1)  # stages than there are devices for: what is left over may make pipelines of its own
_OF_OCTAVE = 3  # numbers of replicas between a power of two and the next one
_SLOWER = 1.5  # times the fastest if nothing waited, up to which a number of replicas is looked at
_BEST = 6  # numbers of stages for each number of replicas and set of pools
_ALL_SETS = 6  # pools, up to which all sets are tried: 64 of them
NO_TIME_S = 1e-12  # of a layer that costs nothing

Layers = NDArray[np.float32]
Runs = tuple[tuple[int, int], ...]
"""Stages of a pipeline from the first on, those of a pool together: the index of a kind, and how many stages there are."""


@dataclass(frozen=True, kw_only=True)
class TemplateSearch:
    """Templates of one micro-batch size.

    Args:
        kinds: of stages. ``room``: devices of each pool. ``most``: replicas at most.
        samples: of a step. ``micro_batch``: of these.
        max_pools: in a pipeline; None: any number.
        zero: the ZeRO level at which memory is counted. ``recompute``: stages may be recomputed.
        filling: the part of a micro-batch for which each stage but one makes the others wait.
        waits_s: for messages in each micro-batch, by kind; none: they take no time.
    """

    kinds: Sequence[Kind]
    room: Ints
    most: int
    samples: int
    micro_batch: int
    max_stages: int
    max_pools: int | None
    zero: int
    recompute: bool
    filling: float
    waits_s: Sequence[float] = ()

    def found(self) -> list[Runs]:
        """For each set of pools and number of replicas those with the shortest estimated steps; equal ones once."""
        found: dict[Runs, None] = {}
        for pools, layers in self.layers.items():
            if pools:
                found.update((self._traced(pools, row, stages), None) for row, stages in self._shortest(layers))
        return list(found)

    @property
    def layers(self) -> Mapping[int, Layers]:
        """The most layers in so many stages, by set of pools (bit mask); minus infinity where there is no such pipeline.

        Shape [rows, stages + 1].
        """
        return self._solved[0]

    @cached_property
    def _solved(self) -> tuple[dict[int, Layers], dict[int, NDArray[np.int16]]]:
        """``layers``, and the number of what is first in the pipeline."""
        # Of equals those with the most memory are ahead, where most micro-batches are in flight.
        memory = {kind.pool: kind.memory_bytes for kind in self.kinds}
        pools = sorted(memory, key=lambda pool: -memory[pool])
        layers, choices = {0: self._start}, dict[int, NDArray[np.int16]]()
        for own in _sets(pools, self.max_pools):
            most = np.full_like(self._start, -np.inf)
            choice = np.full(most.shape, -1, dtype=np.int16)
            for pool in pools:
                behind = layers.get(own ^ 1 << pool)
                if own >> pool & 1 and behind is not None:
                    for number in self._numbers[pool]:
                        ahead = self._blocks[number]
                        sums = behind.take(ahead.at) + ahead.layers
                        better = sums > most
                        most = np.where(better, sums, most)
                        choice[better] = number
            layers[own], choices[own] = most, choice
        return layers, choices

    @cached_property
    def replicas(self) -> Ints:
        """Numbers of replicas worth a look: of each magnitude those with which the least of each pool is left over."""
        found = set(range(1, 9))
        found.update(int(devices) // part for devices in self.room.tolist() for part in range(1, 17))
        found.update(round(2 ** (step / 3)) for step in range(3 * self.most.bit_length() + 1))
        every = np.array(sorted(count for count in found if 1 <= count <= self.most), dtype=np.int64)
        step_s = self._fractional_s(every) * self._rounds(every)
        order = np.argsort(step_s, kind="stable")
        order = order[step_s[order] <= _SLOWER * step_s.min()]
        octaves = np.log2(every[order]).astype(np.int64)
        kept = [order[octaves == octave][:_OF_OCTAVE] for octave in np.unique(octaves)]
        return np.sort(every[np.concatenate(kept)])

    @cached_property
    def seconds(self) -> Floats:
        """Bottleneck times, from what fractions of layers take upwards. Shape [replicas, times]."""
        found: Floats = self._fractional_s(self.replicas)[:, None] * _LATER ** np.arange(TIMES)[None, :]
        return found

    @cached_property
    def rounds(self) -> Ints:
        """Micro-batches of each pipeline. Shape [replicas]."""
        return self._rounds(self.replicas)

    @property
    def stages(self) -> int:
        """The most stages of a pipeline."""
        return min(self.max_stages, self._model_layers, int(self.room.sum()))

    def _rounds(self, replicas: Ints) -> Ints:
        return -(-self.samples // (self.micro_batch * replicas))

    def _fractional_s(self, replicas: Ints) -> Floats:
        """The bottleneck time at which all devices do all layers in fractions, or a single one whole; very long where no pool has enough
        devices.
        """
        pace = np.zeros((len(self.room), len(replicas)))
        layer_s = np.inf
        for kind in self.kinds:
            forward, backward, _ = kind.layer_s
            each_s = max(NO_TIME_S, forward + backward)
            own = np.minimum(self.room[kind.pool] // replicas // kind.devices, self.stages) / each_s
            pace[kind.pool] = np.maximum(pace[kind.pool], own)
            layer_s = min(layer_s, each_s)
        found: Floats = np.maximum(layer_s, self._model_layers / np.maximum(pace.sum(axis=0), NO_TIME_S))
        return found

    @property
    def _model_layers(self) -> int:
        return len(self.kinds[0].table.costs)

    @cached_property
    def _start(self) -> Layers:
        """No stages have no layers."""
        start = np.full((len(self.replicas) * TIMES, self.stages + 1), -np.inf, dtype=np.float32)
        start[:, 0] = 0.0
        return start

    @cached_property
    def _blocks(self) -> list[_Block]:
        return [block for own in self._by_pool.values() for block in own]

    @cached_property
    def _numbers(self) -> dict[int, range]:
        """The numbers of the blocks of each pool."""
        found, first = {}, 0
        for pool, own in self._by_pool.items():
            found[pool] = range(first, first + len(own))
            first += len(own)
        return found

    @cached_property
    def _by_pool(self) -> dict[int, list[_Block]]:
        waits_s = self.waits_s or (0.0,) * len(self.kinds)
        summed = [self._summed(kind, own) for kind, own in zip(self.kinds, waits_s, strict=True)]
        found = {}
        for pool in sorted({kind.pool for kind in self.kinds}):
            own = [number for number, kind in enumerate(self.kinds) if kind.pool == pool]
            each = sorted({self.kinds[number].devices for number in own})
            found[pool] = [self._block(pool, devices, less, own, summed) for devices in each for less in _LESS]
        return found

    def _block(self, pool: int, devices: int, less: int, kinds: Sequence[int], summed: Sequence[Layers]) -> _Block:
        """A stage for every so many devices of a pool, ``less`` fewer, each of the width with which they hold the most layers."""
        count = np.clip(self.room[pool] // self.replicas // devices - less, 0, self.stages)
        behind = np.arange(self.stages + 1)[None, :] - count[:, None]
        fits = np.repeat((behind >= 0) & (count > 0)[:, None], TIMES, axis=0)
        behind = np.repeat(np.maximum(0, behind), TIMES, axis=0)
        at = behind + np.arange(len(behind))[:, None] * behind.shape[1]
        best, width = np.full_like(self._start, -np.inf), np.zeros(self._start.shape, dtype=np.int16)
        for number in kinds:
            if self.kinds[number].devices == devices:
                own = summed[number] - summed[number].take(at)
                width[own > best] = number
                best = np.maximum(best, own)
        return _Block(count=count, at=at, layers=np.where(fits, best, -np.inf), kind=width)

    def _summed(self, kind: Kind, waits_s: float) -> Layers:
        """Layers of the first stages from the end. Shape [rows, stages + 1]."""
        forward, backward, recomputed = kind.layer_s
        held = np.minimum(np.arange(1, self.stages + 1)[None, :], self.rounds[:, None])
        most = np.zeros((len(self.replicas), TIMES, self.stages), dtype=np.float32)
        for again in {False, self.recompute}:
            each_s = max(NO_TIME_S, forward + backward + (recomputed if again else 0.0))
            done = np.floor(np.maximum(0.0, self.seconds - waits_s) / each_s * (1 + 1e-9))
            room = Room.of(kind, self.zero, recompute=again).most_layers(held, self.replicas[:, None])
            most = np.maximum(most, np.minimum(done[:, :, None], room[:, None, :]))
        most = np.minimum(most, self._model_layers)
        sums = np.zeros((*most.shape[:2], self.stages + 1), dtype=np.float32)
        np.cumsum(most, axis=2, out=sums[:, :, 1:])
        return sums.reshape(-1, self.stages + 1)

    def _shortest(self, layers: Layers) -> Iterator[tuple[int, int]]:
        """Rows and numbers of stages that hold the model, with the shortest estimated steps for each number of replicas."""
        stages = np.arange(self.stages + 1)
        waits = self.rounds[:, None] + self.filling * (stages[None, :] - 1)
        about_s = self.seconds[:, :, None] * waits[:, None, :]
        shape = len(self.replicas), TIMES, len(stages)
        about_s = np.where(layers.reshape(shape) >= self._model_layers, about_s, np.inf)
        least_s, times = about_s.min(axis=1), about_s.argmin(axis=1)
        for number, counts in enumerate(np.argsort(least_s, axis=1, kind="stable")[:, :_BEST].tolist()):
            for count in counts:
                if least_s[number, count] < np.inf:
                    yield number * TIMES + int(times[number, count]), count

    def _traced(self, pools: int, row: int, stages: int) -> Runs:
        """The pipeline that holds the most layers."""
        runs = []
        while pools:
            block = self._blocks[int(self._solved[1][pools][row, stages])]
            kind, count = int(block.kind[row, stages]), int(block.count[row // TIMES])
            runs.append((kind, count))
            pools ^= 1 << self.kinds[kind].pool
            stages -= count
        return tuple(runs)


@dataclass(frozen=True, kw_only=True)
class _Block:
    """Stages of one pool ahead of others.

    Args:
        count: of stages. Shape [replicas].
        at: where in an array of the same shape the entry of the stages behind it is. Shape [rows, stages + 1], as of all that follow.
        layers: that it holds, minus infinity where there is no such block. ``kind``: of its stages.
    """

    count: Ints
    at: Ints
    layers: Layers
    kind: NDArray[np.int16]


class Room(NamedTuple):
    """Memory of stages, if every layer is like the mean of the model: bytes for its layers times the layers of the model, and of all of
    these the state that is on each replica, what replicas share, and the activations of a micro-batch. Numbers, or an array for each.
    """

    free: Floats | float
    whole: Floats | float
    shared: Floats | float
    activations: Floats | float

    @classmethod
    def of(cls, kind: Kind, zero: int, *, recompute: bool) -> Room:
        """At a ZeRO level."""
        layers = len(kind.table.costs)
        own = kind.table.memory(0, layers, recompute=recompute, held=1, replicas=2, zero=zero)
        state = (own.optimizer, own.gradients, own.parameters)  # sharded from levels 1, 2 and 3 on
        return cls(
            free=max(0.0, kind.memory_bytes - own.passing) * layers,
            whole=sum(size for level, size in enumerate(state, 1) if level > zero),
            shared=sum(2 * size for level, size in enumerate(state, 1) if level <= zero),
            activations=own.activations,
        )

    def most_layers(self, held: Floats | Ints, replicas: Floats | Ints) -> Floats:
        """The number of layers for which a stage has memory. ``held``: micro-batches in flight. ``replicas``: that shard state."""
        each = self.whole + self.shared / replicas + held * self.activations
        found: Floats = np.floor(self.free / np.maximum(1.0, each))
        return found


def _sets(pools: Sequence[int], most: int | None) -> list[int]:
    """Sets of at most so many pools as bit masks, smaller ones first: all of a few pools; of many, those that follow each other in this
    order, to which pools come at either end.
    """
    sizes = range(1, min(most or len(pools), len(pools)) + 1)
    if len(pools) <= _ALL_SETS:
        return [sum(1 << pool for pool in own) for n in sizes for own in combinations(pools, n)]
    return [sum(1 << pool for pool in pools[at : at + n]) for n in sizes for at in range(len(pools) - n + 1)]

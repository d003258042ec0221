"""Exact search of pipelines over few devices: for every number of devices of each pool, the sequences of stages with the shortest steps.

Under 1F1B a stage that is ``depth`` places from the end holds as many micro-batches, so sequences are built from their end. Stage i cannot
begin before the ones before it have had the first micro-batch, nor end after they have begun the last backward, so n micro-batches take at
least H[i] = max(n cost[i], cost[i] + H[i + 1]). H[i] grows with H[i + 1]; so of all sequences over the same devices with as many stages
only the least H for each first layer is kept, and the states are the devices in use.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from heterodyne.search.fleet.arrays import Floats, Ints
from heterodyne.search.fleet.counts import best_per_devices
from heterodyne.search.fleet.cutter import StageCosts
from heterodyne.search.fleet.kinds import Kind

__all__ = ["ExactSearch", "Found"]

Devices = tuple[int, ...]
"""In use, of each pool."""


@dataclass(frozen=True, kw_only=True)
class Found:
    """Pipelines. Arrays have one value per pipeline.

    Args:
        devices: in use. Shape [pipelines, pools]. ``stages``: the number of them.
        kind: of the first stage. ``number``: of the number of micro-batches for which it is cut.
        seconds: that these take. ``bottleneck_s``: of one on the bottleneck stage.
    """

    devices: Ints
    stages: Ints
    kind: Ints
    number: Ints
    seconds: Floats
    bottleneck_s: Floats


@dataclass(frozen=True, kw_only=True)
class _State:
    """The best sequences over some devices. Arrays have the shape [numbers of micro-batches, layers + 1], from each first layer on.

    Args:
        seconds: that they take, infinite where none fits. ``bottleneck_s``: of a micro-batch on the bottleneck stage.
        kind: of the first stage. ``stop``: the layer before which it ends.
        whole: those of whole models, by the kind of the first stage; kinds, seconds, bottleneck_s and stop. Shape [kinds, numbers].
    """

    seconds: Floats
    bottleneck_s: Floats
    kind: Ints
    stop: Ints
    whole: tuple[Ints, Floats, Floats, Ints]


@dataclass(frozen=True, kw_only=True)
class ExactSearch:
    """Pipelines of one micro-batch size.

    Args:
        kinds: of stages. ``room``: devices of each pool.
        micro_batches: numbers of them for which pipelines are cut, ascending.
        max_pools: in a pipeline; None: any number.
        replicas: that shard state. ``zero``: the ZeRO level.
        waits_s: for messages in each micro-batch, by kind.
    """

    kinds: Sequence[Kind]
    room: Ints
    micro_batches: Sequence[int]
    max_stages: int
    max_pools: int | None
    replicas: int
    zero: int
    recompute: bool
    waits_s: Sequence[float]

    def found(self, most: int) -> Found:
        """For each number of devices and of micro-batches the ``most`` shortest, with different kinds first or numbers of stages."""
        parts: list[tuple[NDArray[Any], ...]] = []
        for depth, level in enumerate(self._levels[1:], 1):
            for used, state in level.items():
                kinds, seconds, bottleneck_s, _ = state.whole
                at, number = np.nonzero(np.isfinite(seconds))
                own = seconds[at, number], bottleneck_s[at, number]
                parts.append((np.tile(used, (len(at), 1)), np.full(len(at), depth), kinds[at], number, *own))
        if not parts:
            parts = [(np.zeros((0, len(self.room)), dtype=np.int64), *(np.zeros(0, dtype=np.int64) for _ in range(5)))]
        devices, stages, kind, number, seconds, longest_s = (np.concatenate(own) for own in zip(*parts, strict=True))
        kept = best_per_devices(-seconds, np.column_stack([devices, number]), most)
        return Found(
            devices=devices[kept],
            stages=stages[kept],
            kind=kind[kept],
            number=number[kept],
            seconds=seconds[kept],
            bottleneck_s=longest_s[kept],
        )

    def chain(self, devices: Devices, stages: int, kind: int, number: int) -> list[int]:
        """The kinds of the stages of a pipeline that was found, from the first on."""
        kinds, *_, stops = self._levels[stages][devices].whole
        found, layer = [], int(stops[int(np.flatnonzero(kinds == kind)[0]), number])
        while True:
            found.append(kind)
            devices, stages = self._without(devices, kind), stages - 1
            if not stages:
                return found
            state = self._levels[stages][devices]
            kind, layer = int(state.kind[number, layer]), int(state.stop[number, layer])

    @cached_property
    def _levels(self) -> list[dict[Devices, _State]]:
        """States by number of stages."""
        shape = len(self.micro_batches), self._layers + 1
        seconds = np.full(shape, np.inf)
        seconds[:, -1] = 0.0
        none = np.zeros(shape, dtype=np.int64)
        whole = none[:0, 0], seconds[:0], seconds[:0], none[:0]
        start = _State(seconds=seconds, bottleneck_s=np.zeros(shape), kind=none, stop=none, whole=whole)
        levels = [{(0,) * len(self.room): start}]
        for depth in range(1, min(self.max_stages, self._layers, int(self.room.sum())) + 1):
            sources: dict[Devices, list[tuple[int, _State]]] = {}
            for used, state in levels[-1].items():
                for kind in range(len(self.kinds)):
                    longer = self._with(used, kind)
                    if longer is not None:
                        sources.setdefault(longer, []).append((kind, state))
            found = {used: self._best(depth, own) for used, own in sources.items()}
            levels.append({used: state for used, state in found.items() if np.isfinite(state.seconds).any()})
        return levels

    def _best(self, depth: int, sources: Sequence[tuple[int, _State]]) -> _State:
        """``sources``: kinds of the first stage, and what follows it."""
        kinds = np.array([kind for kind, _ in sources])
        after, longest_s = (
            np.array([getattr(state, name) for _, state in sources])[:, :, None, :]
            for name in ("seconds", "bottleneck_s")
        )
        held = np.minimum(depth, self.micro_batches)  # in flight, for each number of micro-batches
        costs = self._costs[held[None, :], kinds[:, None]]
        count = np.array(self.micro_batches)[None, :, None, None]
        seconds = np.maximum(count * costs, costs + after)
        stops = seconds.argmin(axis=3)
        at = stops[..., None]
        least, own = (np.take_along_axis(values, at, axis=3)[..., 0] for values in (seconds, costs))
        longest_s = np.maximum(own, np.take_along_axis(longest_s, at.swapaxes(2, 3), axis=3)[..., 0, :])
        best = least.argmin(axis=0)[None]
        most_s, last = (np.take_along_axis(values, best, axis=0)[0] for values in (longest_s, stops))
        return _State(
            seconds=least.min(axis=0),
            bottleneck_s=most_s,
            kind=kinds[best[0]],
            stop=last,
            whole=(kinds, least[..., 0], longest_s[..., 0], stops[..., 0]),
        )

    def _with(self, used: Devices, kind: int) -> Devices | None:
        """With another stage, if the devices and the number of pools allow it."""
        pool = self.kinds[kind].pool
        longer = (*used[:pool], used[pool] + self.kinds[kind].devices, *used[pool + 1 :])
        pools = sum(map(bool, longer))
        within = longer[pool] <= self.room[pool] and pools <= (self.max_pools or pools)
        return longer if within else None

    def _without(self, used: Devices, kind: int) -> Devices:
        pool = self.kinds[kind].pool
        return (*used[:pool], used[pool] - self.kinds[kind].devices, *used[pool + 1 :])

    @cached_property
    def _costs(self) -> Floats:
        """Seconds per micro-batch of a stage from any layer to any other, infinite where it does not fit. Shape [micro-batches in flight,
        kinds, layers + 1, layers + 1].
        """
        held = np.arange(min(self.max_stages, self._layers, int(self.room.sum())) + 1)[:, None, None]
        found = []
        for kind, waits_s in zip(self.kinds, self.waits_s, strict=True):
            own = StageCosts.of(kind.table, kind.memory_bytes, self.replicas, self.zero, recompute=self.recompute)
            found.append(own.seconds(held) + waits_s)
        return np.array(found).swapaxes(0, 1)

    @property
    def _layers(self) -> int:
        return len(self.kinds[0].table.costs)

"""Candidates: pipelines that the template search has found for each micro-batch size, with their estimates, in one table."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import permutations

import numpy as np
from numpy.typing import NDArray

from heterodyne.search.fleet.arrays import Floats, Ints
from heterodyne.search.fleet.counts import Limits
from heterodyne.search.fleet.cutter import Places
from heterodyne.search.fleet.kinds import Kind
from heterodyne.search.fleet.pipeline_estimate import PipelineEstimate
from heterodyne.search.fleet.plan import SPLIT
from heterodyne.search.fleet.predict import Predictor
from heterodyne.search.fleet.space import Space
from heterodyne.search.fleet.template_search import Runs, TemplateSearch

__all__ = ["Candidates"]

_ALL_ORDERS = 3  # pools, up to which all orders are estimated: six of them


@dataclass(frozen=True, kw_only=True)
class Candidates:
    """A table of pipelines. Arrays have one value per pipeline.

    Args:
        places: the stages of each. ``sizes``: micro-batch sizes. ``pools``: as bit masks.
        devices: Shape [pipelines, pools]. ``count``: replicas for which there are devices.
        bottleneck_s: seconds of a micro-batch on the bottleneck stage. ``filling_s``: that it waits in a step.
        sync_s: exposed seconds of gradient and parameter sync.
    """

    places: NDArray[np.object_]
    sizes: Ints
    pools: Ints
    devices: Ints
    count: Ints
    bottleneck_s: Floats
    filling_s: Floats
    sync_s: Floats

    def __len__(self) -> int:
        return len(self.sizes)

    def select(self, which: NDArray[np.bool_] | Ints) -> Candidates:
        """Some of them."""
        return replace(self, **{name: own[which] for name, own in vars(self).items()})

    def within(self, limits: Limits) -> Candidates:
        """Those that the limits allow, with the numbers of replicas that they do."""
        own = replace(self, count=limits.most_of(self.devices))
        return own.select(own.count >= max(1, limits.least))

    def best_alike(self, samples: int, most: int, each: int = 0) -> Ints:
        """Those with the least estimated steps as alike pipelines, fastest first: ``most``, and ``each`` over each set of pools."""
        order = np.argsort(self.alike_s(samples), kind="stable")
        pools = self.pools[order]
        kept = np.arange(len(order)) < most
        for own in np.unique(pools) if each else ():
            kept[np.flatnonzero(pools == own)[:each]] = True
        found: Ints = order[kept]
        return found

    def alike_s(self, samples: int) -> Floats:
        """Estimated seconds of a step of as many replicas as there are devices for."""
        found: Floats = np.ceil(samples / (self.sizes * self.count)) * self.bottleneck_s + self.filling_s + self.sync_s
        return found

    @classmethod
    def found(cls, predictor: Predictor, space: Space, kinds: Mapping[int, Sequence[Kind]], zero: int) -> Candidates:
        """All that is found for stage kinds by micro-batch size, over all pools and over each alone, with memory at a ZeRO level."""
        parts = [part for size, own in kinds.items() if own for part in _of_size(predictor, space, own, size, zero)]
        if not parts:
            return cls._none(len(predictor.fleet.pools))
        return cls(**{name: np.concatenate([vars(part)[name] for part in parts]) for name in vars(parts[0])})

    @classmethod
    def _none(cls, pools: int) -> Candidates:
        ints, floats = np.zeros(0, dtype=np.int64), np.zeros(0)
        return cls(
            places=np.zeros(0, dtype=object), sizes=ints, pools=ints, devices=np.zeros((0, pools), dtype=np.int64),
            count=ints, bottleneck_s=floats, filling_s=floats, sync_s=floats,
        )  # fmt: skip


def _of_size(predictor: Predictor, space: Space, kinds: Sequence[Kind], size: int, zero: int) -> Iterator[Candidates]:
    limits = Limits(room=np.array([pool.devices for pool in predictor.fleet.pools]), most=space.max_pipelines)
    filling = _filling(kinds, space)
    most = max(1, min(int(limits.room.sum()), predictor.global_batch // size, limits.most or predictor.global_batch))
    estimates = PipelineEstimate(
        predictor=predictor, kinds=kinds, micro_batch=size, zero=zero, recompute=space.recompute
    )
    waits_s = estimates.waits_s()
    pools = sorted({kind.pool for kind in kinds})
    rooms = [limits.room, *(np.where(np.arange(len(limits.room)) == pool, limits.room, 0) for pool in pools)]
    found: dict[Runs, None] = {}
    for room in rooms if len(pools) > 1 else rooms[:1]:
        own = [number for number, kind in enumerate(kinds) if room[kind.pool] >= kind.devices]
        if not own:
            continue
        search = TemplateSearch(
            kinds=[kinds[number] for number in own],
            room=room,
            most=most,
            samples=predictor.global_batch,
            micro_batch=size,
            max_stages=space.max_stages,
            max_pools=space.max_pools,
            zero=zero,
            recompute=space.recompute,
            filling=filling,
            waits_s=[waits_s[number] for number in own],
        )
        found.update((tuple((own[kind], count) for kind, count in runs), None) for runs in search.found())
    if not found:
        return
    chains, runs = _distinct(*_reordered(*_arrays(found)))
    devices, _ = _devices(kinds, chains, runs, len(limits.room))
    estimate = estimates.of(chains, runs, np.maximum(1, limits.most_of(devices)))
    shorter = _without_surplus(runs, estimate.layers, len(kinds[0].table.costs))
    chains, runs = _distinct(*_together(np.concatenate([chains, chains]), np.concatenate([runs, shorter])))
    devices, bits = _devices(kinds, chains, runs, len(limits.room))
    count = limits.most_of(devices)
    estimate = estimates.of(chains, runs, np.maximum(1, count))
    known = np.isfinite(estimate.bottleneck_s) & (count >= max(1, limits.least))
    bottleneck_s, runs = estimate.bottleneck_s[known], runs[known]
    rows = (zip(*row, strict=True) for row in zip(chains[known].tolist(), runs.tolist(), strict=True))
    places: list[Places] = [tuple((kinds[k].name, kinds[k].widths, n) for k, n in row if n) for row in rows]
    objects = np.empty(len(places), dtype=object)
    objects[:] = places
    yield Candidates(
        places=objects,
        sizes=np.full(len(places), size, dtype=np.int64),
        pools=bits[known],
        devices=devices[known],
        count=count[known],
        bottleneck_s=bottleneck_s,
        filling_s=filling * (runs.sum(axis=1) - 1) * bottleneck_s + estimate.messages_s[known],
        sync_s=estimate.sync_s[known],
    )


def _reordered(chains: Ints, runs: Ints) -> tuple[Ints, Ints]:
    """In all orders of a few pools, and of more with two neighbours exchanged: of those as good for memory the search gives one."""
    wide = chains.shape[1]
    if wide <= _ALL_ORDERS:
        orders = list(permutations(range(wide)))
    else:
        orders = [(*range(at), at + 1, at, *range(at + 2, wide)) for at in range(wide - 1)]
        orders.append(tuple(range(wide)))
    every = [(chains[:, order], runs[:, order]) for order in map(list, orders)]
    return _together(*(np.concatenate(own) for own in zip(*every, strict=True)))


def _together(chains: Ints, runs: Ints) -> tuple[Ints, Ints]:
    """With unused places last."""
    order = np.argsort(runs == 0, axis=1, kind="stable")
    return np.take_along_axis(chains, order, axis=1), np.take_along_axis(runs, order, axis=1)


def _without_surplus(runs: Ints, layers: Floats, whole: int) -> Ints:
    """Without the stages that are not needed to hold all layers, from the first ones on, where most micro-batches are in flight."""
    left = runs.copy()
    surplus = (left * layers).sum(axis=1) - whole
    for place in range(runs.shape[1]):
        each = np.maximum(1.0, layers[:, place])
        fewer = np.clip(surplus // each, 0, left[:, place]).astype(np.int64)
        left[:, place] -= fewer
        surplus -= fewer * layers[:, place]
    return np.where(np.isfinite(surplus)[:, None], left, runs)


def _distinct(chains: Ints, runs: Ints) -> tuple[Ints, Ints]:
    both = np.unique(np.concatenate([np.where(runs > 0, chains, 0), runs], axis=1), axis=0)
    return both[:, : chains.shape[1]], both[:, chains.shape[1] :]


def _filling(kinds: Sequence[Kind], space: Space) -> float:
    """The part of a micro-batch for which each stage but one makes the others wait. Where backwards are halved, one that waits for its
    first forward does what others have left over at the end.
    """
    if SPLIT.isdisjoint(space.schedules):
        return 1.0
    passes = [[own[-1] for own in kind.table.passes] for kind in kinds]
    return float(np.mean([forward / max(1e-12, forward + backward) for forward, backward, _ in passes]))


def _arrays(found: Iterable[Runs]) -> tuple[Ints, Ints]:
    """Kinds and numbers of stages; zeros behind them. Shape [pipelines, places]."""
    every = list(found)
    wide = max(map(len, every))
    chains, runs = (np.array([[own[at] for own in of] + [0] * (wide - len(of)) for of in every]) for at in (0, 1))
    return chains, runs


def _devices(kinds: Sequence[Kind], chains: Ints, runs: Ints, pools: int) -> tuple[Ints, Ints]:
    """Devices of each pool, and the pools as bit masks."""
    devices, pool = (np.array([getattr(kind, name) for kind in kinds]) for name in ("devices", "pool"))
    need = np.zeros((len(chains), pools), dtype=np.int64)
    for own, run in zip(chains.T, runs.T, strict=True):
        need[np.arange(len(chains)), pool[own]] += run * devices[own]
    return need, ((need > 0) << np.arange(pools)).sum(axis=1)

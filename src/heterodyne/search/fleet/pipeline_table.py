"""The table of pipelines that were found for each micro-batch size, with their estimates.

Over few devices, where whole numbers matter, they come from the exact search (`exact_search`), else from the template search.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property, partial
from itertools import groupby, permutations, product
from math import ceil
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from heterodyne.search.fleet.arrays import Floats, Ints
from heterodyne.search.fleet.counts import Limits, best_per_devices, capacities
from heterodyne.search.fleet.cutter import Cutter, Places
from heterodyne.search.fleet.exact_search import ExactSearch
from heterodyne.search.fleet.kinds import Kind
from heterodyne.search.fleet.pipeline_estimate import PipelineEstimate
from heterodyne.search.fleet.plan import Template
from heterodyne.search.fleet.predict import Predictor
from heterodyne.search.fleet.space import Space
from heterodyne.search.fleet.template_search import NO_TIME_S, Runs, TemplateSearch

__all__ = ["PipelineTable"]

_ALL_ORDERS = 3  # pools, up to which all orders are estimated: six of them
_KEPT = 2  # pipelines over the same devices with as many stages, of the template search
_FOLDED = 40  # pipelines of a micro-batch size for whose pools other widths are tried
_ROUNDS = 3  # in which they are, for one pool in each
_EXACT = 3  # pipelines over the same devices, of the exact search


@dataclass(frozen=True, kw_only=True)
class PipelineTable:
    """A table of pipelines. Arrays have one value per pipeline.

    Args:
        places: gives the stages of each. ``stages``: the number of them. ``sizes``: micro-batch sizes.
        devices: Shape [pipelines, pools]. ``count``: replicas for which there are devices.
        micro_batches: of a step, for which the pipeline was found; where all replicas share state, those of as many.
        bottleneck_s: seconds of a micro-batch on the bottleneck stage. ``filling_s``: that it waits in a step.
        sync_s: exposed seconds of gradient and parameter sync.
        zero, shards: the ZeRO level and the pipelines that share state, for which memory is counted; None: all replicas of a pipeline do.
    """

    places: NDArray[np.object_]
    stages: Ints
    sizes: Ints
    devices: Ints
    count: Ints
    micro_batches: Ints
    bottleneck_s: Floats
    filling_s: Floats
    sync_s: Floats
    zero: int
    shards: int | None = None

    def __len__(self) -> int:
        return len(self.sizes)

    def select(self, which: NDArray[np.bool_] | Ints) -> Self:
        """Some of them."""
        arrays: dict[str, Any] = {name: own[which] for name, own in vars(self).items() if isinstance(own, np.ndarray)}
        return replace(self, **arrays)

    def within(self, limits: Limits) -> Self:
        """Those that the limits allow, with the numbers of replicas that they do."""
        own = replace(self, count=limits.most_of(self.devices))
        return own.select(own.count >= 1)

    def cut(self, which: Iterable[int], cutter: Cutter, samples: int) -> list[tuple[Template, int]]:
        """Some of them as templates, each with its number of replicas; equal ones once."""
        found: dict[tuple[Template, int], None] = {}
        for number in which:
            size, count = int(self.sizes[number]), int(self.count[number])
            rounds = int(self.micro_batches[number]) if self.shards else ceil(samples / (size * count))
            cut = cutter.cut(self.places[number](), size, rounds, self.shards or count, self.zero)
            found.update(((template, count), None) for template in cut)
        return list(found)

    def best_alike(self, samples: int, most: int) -> Ints:
        """The ``most`` with the least estimated steps as alike pipelines, fastest first."""
        found: Ints = np.argsort(self.alike_s(samples), kind="stable")[:most]
        return found

    def alike_s(self, samples: int) -> Floats:
        """Estimated seconds of a step of as many replicas as there are devices for."""
        found: Floats = np.ceil(samples / (self.sizes * self.count)) * self.bottleneck_s + self.filling_s + self.sync_s
        return found

    def capacity(self, seconds: float | Floats) -> Floats:
        """Samples that each pipeline does in a time, with fractional micro-batches."""
        return capacities(self.bottleneck_s, self.bottleneck_s + self.filling_s, self.sizes, seconds)

    def same(self, other: PipelineTable) -> bool:
        """Whether the pipelines of both are as fast."""
        return len(self) == len(other) and np.allclose(self.bottleneck_s, other.bottleneck_s, rtol=1e-9, atol=0)

    @classmethod
    def found(
        cls,
        predictor: Predictor,
        space: Space,
        kinds: Mapping[int, Sequence[Kind]],
        zero: int,
        shards: int | None = None,
    ) -> PipelineTable:
        """All that is found for stage kinds by micro-batch size. ``shards``: over few devices, with the exact search."""
        sizes = [
            _OfSize(predictor=predictor, space=space, kinds=own, size=size, zero=zero)
            for size, own in kinds.items()
            if own
        ]
        every = (own.estimated() if shards is None else own.exact(shards) for own in sizes)
        parts = [part for part in every if part is not None]
        return cls.joined(parts) if parts else cls._none(len(predictor.fleet.pools))

    @classmethod
    def joined(cls, parts: Sequence[Self]) -> Self:
        """All of several tables of the same level."""
        names = [name for name, own in vars(parts[0]).items() if isinstance(own, np.ndarray)]
        arrays: dict[str, Any] = {name: np.concatenate([vars(part)[name] for part in parts]) for name in names}
        return replace(parts[0], **arrays)

    @classmethod
    def _none(cls, pools: int) -> PipelineTable:
        ints, floats = np.zeros(0, dtype=np.int64), np.zeros(0)
        return cls(
            places=np.zeros(0, dtype=object), stages=ints, sizes=ints, devices=np.zeros((0, pools), dtype=np.int64), count=ints,
            micro_batches=ints, bottleneck_s=floats, filling_s=floats, sync_s=floats, zero=0,
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class _Estimated(PipelineTable):
    """Pipelines of the template search. The arrays have one column per place.

    Args:
        chains: kinds of stages. ``runs``: the number of stages of each. ``layers``: that one of these may hold.
    """

    chains: Ints
    runs: Ints
    layers: Floats


@dataclass(frozen=True, kw_only=True)
class _OfSize:
    """The pipelines of one micro-batch size."""

    predictor: Predictor
    space: Space
    kinds: Sequence[Kind]
    size: int
    zero: int

    def exact(self, shards: int) -> PipelineTable:
        """Those of the exact search, if so many pipelines share state."""
        limits, estimates = self._limits, self._estimates
        most = ceil(self.predictor.global_batch / self.size)
        search = ExactSearch(
            kinds=self.kinds,
            room=limits.room,
            micro_batches=sorted({*(4**n for n in range(most.bit_length() // 2 + 1) if 4**n < most), most}),
            max_stages=self.space.max_stages,
            max_pools=self.space.max_pools,
            replicas=shards,
            zero=self.zero,
            recompute=self.space.recompute,
            waits_s=estimates.waits_s(),
        )
        found = search.found(_EXACT)
        rows = zip(
            found.devices.tolist(), found.stages.tolist(), found.kind.tolist(), found.number.tolist(), strict=True
        )
        chains = [partial(self._chain, search, tuple(devices), *own) for devices, *own in rows]
        rounds = np.array(search.micro_batches)[found.number]
        return PipelineTable(
            places=_objects(chains),
            stages=found.stages,
            sizes=np.full(len(chains), self.size, dtype=np.int64),
            devices=found.devices,
            count=limits.most_of(found.devices),
            micro_batches=rounds,
            bottleneck_s=found.bottleneck_s,
            filling_s=found.seconds - rounds * found.bottleneck_s,
            sync_s=estimates.sync_of_devices_s(found.devices, found.bottleneck_s),
            zero=self.zero,
            shards=shards,
        )

    def _chain(self, search: ExactSearch, devices: tuple[int, ...], stages: int, kind: int, number: int) -> Places:
        chain = [self.kinds[own] for own in search.chain(devices, stages, kind, number)]
        return tuple((kind.name, kind.widths, len(list(own))) for kind, own in groupby(chain))

    def estimated(self) -> PipelineTable | None:
        """Those of the template search, over all pools and over each alone; None if nothing fits."""
        found = dict.fromkeys(self._runs())
        if not found:
            return None
        samples = self.predictor.global_batch
        # Orders, other widths and stages that are not needed are looked at of the best alone.
        best = self._estimated(*_arrays(found), hopeful=True)
        best = self._estimated(*_reordered(best.chains, best.runs))
        for _ in range(_ROUNDS):
            which = best.select(best.best_alike(samples, _FOLDED))
            best = self._best(best, self._estimated(*self._folded(which.chains, which.runs)))
        shorter = _without_surplus(best.runs, best.layers, len(self.kinds[0].table.costs))
        best = self._best(best, self._estimated(*_together(best.chains, shorter)))
        return PipelineTable(**{own.name: getattr(best, own.name) for own in fields(PipelineTable)})

    def _folded(self, chains: Ints, runs: Ints) -> tuple[Ints, Ints]:
        """With stages of another kind over all the devices of one of the pools."""
        pools, devices = (np.array([getattr(kind, name) for kind in self.kinds]) for name in ("pool", "devices"))
        found = [(chains[:0], runs[:0])]
        for place, kind in product(range(chains.shape[1]), range(len(self.kinds))):
            used = runs[:, place] * devices[chains[:, place]]
            which = (pools[chains[:, place]] == pools[kind]) & (chains[:, place] != kind) & (used > 0)
            which &= used % devices[kind] == 0
            other, count = chains[which], runs[which]
            other[:, place], count[:, place] = kind, used[which] // devices[kind]
            short = count.sum(axis=1) <= self.space.max_stages
            found.append((other[short], count[short]))
        both = (np.concatenate(own) for own in zip(*found, strict=True))
        return next(both), next(both)

    def _best(self, *parts: _Estimated) -> _Estimated:
        """The best of all parts over the same devices."""
        every = _Estimated.joined(parts)
        every = every.select(
            np.unique(np.concatenate([every.chains, every.runs], axis=1), axis=0, return_index=True)[1]
        )
        return self._kept(every)

    def _kept(self, every: _Estimated) -> _Estimated:
        """Those with the least estimated steps over the same devices."""
        over = np.column_stack([every.devices, every.stages])
        return every.select(best_per_devices(-every.alike_s(self.predictor.global_batch), over, _KEPT))

    def _estimated(self, chains: Ints, runs: Ints, *, hopeful: bool = False) -> _Estimated:
        """Those of some pipelines that fit with the least estimated steps over the same devices, each once.

        ``hopeful``: backwards are split, in the memory that they need if they are not.
        """
        chains, runs = _distinct(chains, runs)
        devices = self._devices(chains, runs)
        there = self._limits.most_of(devices) >= 1
        chains, runs, devices = chains[there], runs[there], devices[there]
        count = self._limits.most_of(devices)
        estimate = self._estimates.of(chains, runs, count)
        fits = np.isfinite(estimate.bottleneck_s)
        chains, runs, devices, count, estimate = (
            chains[fits],
            runs[fits],
            devices[fits],
            count[fits],
            estimate.select(fits),
        )
        rounds, stages = -(-self.predictor.global_batch // (self.size * count)), runs.sum(axis=1)
        filling: Floats | float = self._filling if hopeful else 1.0
        if not hopeful and self._filling < 1:
            halved = self._estimates.of(chains, runs, count, split=True)
            waits = (rounds + self._filling * (stages - 1)) / (rounds + stages - 1)
            sooner = waits * halved.bottleneck_s < estimate.bottleneck_s
            filling = np.where(sooner, self._filling, 1.0)
            estimate = estimate.where(sooner, halved)
        found = _Estimated(
            places=np.zeros(len(count), dtype=object),
            stages=stages,
            sizes=np.full(len(count), self.size, dtype=np.int64),
            devices=devices,
            count=count,
            micro_batches=rounds,
            bottleneck_s=estimate.bottleneck_s,
            filling_s=filling * (stages - 1) * estimate.bottleneck_s + estimate.messages_s,
            sync_s=estimate.sync_s,
            zero=self.zero,
            chains=chains,
            runs=runs,
            layers=estimate.layers,
        )
        kept = self._kept(found)
        rows = zip(kept.chains.tolist(), kept.runs.tolist(), strict=True)
        return replace(kept, places=_objects([partial(self._places, *row) for row in rows]))

    def _runs(self) -> Iterator[Runs]:
        room, samples = self._limits.room, self.predictor.global_batch
        most = max(1, min(int(room.sum()), samples // self.size, self._limits.most or samples))
        waits_s = self._estimates.waits_s()
        pools = sorted({kind.pool for kind in self.kinds})
        rooms = [room, *(np.where(np.arange(len(room)) == pool, room, 0) for pool in pools)]
        for part in rooms if len(pools) > 1 else rooms[:1]:
            own = [number for number, kind in enumerate(self.kinds) if part[kind.pool] >= kind.devices]
            if not own:
                continue
            search = TemplateSearch(
                kinds=[self.kinds[number] for number in own],
                room=part,
                most=most,
                samples=samples,
                micro_batch=self.size,
                max_stages=self.space.max_stages,
                max_pools=self.space.max_pools,
                zero=self.zero,
                recompute=self.space.recompute,
                filling=self._filling,
                waits_s=[waits_s[number] for number in own],
            )
            yield from (tuple((own[kind], count) for kind, count in runs) for runs in search.found())

    @cached_property
    def _limits(self) -> Limits:
        room = np.array([pool.devices for pool in self.predictor.fleet.pools], dtype=np.int64)
        return Limits(room=room, most=self.space.max_pipelines)

    @cached_property
    def _estimates(self) -> PipelineEstimate:
        return PipelineEstimate(
            predictor=self.predictor,
            kinds=self.kinds,
            micro_batch=self.size,
            zero=self.zero,
            recompute=self.space.recompute,
        )

    @cached_property
    def _filling(self) -> float:
        """The part of a micro-batch for which each stage but one makes the others wait. Where backwards are halved, one that waits for its
        first forward does what others have left over at the end.
        """
        if not self.space.splits:
            return 1.0
        passes = [kind.layer_s for kind in self.kinds]
        return float(np.mean([forward / max(NO_TIME_S, forward + backward) for forward, backward, _ in passes]))

    def _places(self, chain: Sequence[int], runs: Sequence[int]) -> Places:
        kinds = (self.kinds[number] for number in chain)
        return tuple((kind.name, kind.widths, count) for kind, count in zip(kinds, runs, strict=True) if count)

    def _devices(self, chains: Ints, runs: Ints) -> Ints:
        """Devices of each pool. Shape [pipelines, pools]."""
        devices, pool = (np.array([getattr(kind, name) for kind in self.kinds]) for name in ("devices", "pool"))
        need = np.zeros((len(chains), len(self._limits.room)), dtype=np.int64)
        for own, run in zip(chains.T, runs.T, strict=True):
            need[np.arange(len(chains)), pool[own]] += run * devices[own]
        return need


def _objects(every: Sequence[Callable[[], Places]]) -> NDArray[np.object_]:
    found = np.empty(len(every), dtype=object)
    found[:] = every
    return found


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


def _arrays(found: Iterable[Runs]) -> tuple[Ints, Ints]:
    """Kinds and numbers of stages; zeros behind them. Shape [pipelines, places]."""
    every = list(found)
    wide = max(map(len, every))
    chains, runs = (np.array([[own[at] for own in of] + [0] * (wide - len(of)) for of in every]) for at in (0, 1))
    return chains, runs

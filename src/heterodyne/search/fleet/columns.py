"""Selection of the columns of the restricted master: pipelines of the highest reduced value at some step times.

The reduced value of a pipeline is the samples that it does in a given time, less what its devices are worth elsewhere: the dual prices of
the relaxed knapsack over all pipelines (`counts`). The time is the one in which fractions of pipelines just do the batch. A step ends with
the longest exchange of gradients, and a ring runs at the pace of its slowest link; so there is one relaxation for each set of pools
without the slowest links, and for each bound on what a pipeline may expose of the exchange. Pipelines exchange stage by stage where they
are cut alike, else in parts of stages, which takes longer; so there is one too for pipelines over a pool each with as many stages.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import inf

import numpy as np

from heterodyne.cluster.fleet import Fleet
from heterodyne.search.fleet.arrays import Floats, Ints
from heterodyne.search.fleet.counts import Limits, best_per_devices, relaxed, shortest_s
from heterodyne.search.fleet.fleet_wires import Wires
from heterodyne.search.fleet.pipeline_table import PipelineTable

__all__ = ["Relaxation", "columns_of", "relaxations"]

_QUANTILES = (1.0, 0.7, 0.5, 0.35, 0.2, 0.1, 0.05)
_NEARLY = 1.2  # times the fastest relaxation
_LATER = (1.0, 1.1, 1.25)  # whole numbers of pipelines take longer than fractions


@dataclass(frozen=True, kw_only=True)
class Relaxation:
    """Fractions of pipelines that just do the batch.

    Args:
        bound_s: lower bound on the seconds of whole pipelines. ``pipelines_s``: of these.
        sync_s: the most that any of the pipelines exposes of the exchange after them.
        limits: without the pools that have slower links. ``pipelines``: over the other pools.
    """

    bound_s: float
    pipelines_s: float
    sync_s: float
    limits: Limits
    pipelines: PipelineTable

    @property
    def step_s(self) -> float:
        return self.pipelines_s + self.sync_s


def relaxations(pipelines: PipelineTable, fleet: Fleet, limits: Limits, samples: int, *, few: bool) -> list[Relaxation]:
    """The fastest of pipelines that are cut alike, the fastest of all, and that of all whatever they exchange; none if no mix keeps the
    limits. Those that are much slower than the fastest are left out, but not over ``few`` devices: what is exposed of an exchange is
    estimated, and there it decides.
    """
    alone = pipelines.select((pipelines.devices > 0).sum(axis=1) == 1)
    aligned = [
        _fastest(alone.select(alone.stages == count), fleet, limits, samples, (1.0,))
        for count in np.unique(alone.stages)
    ]
    every = sorted((own for own in aligned if own is not None), key=lambda own: own.step_s)[:1]
    every += [own for own in (_fastest(pipelines, fleet, limits, samples, q) for q in (_QUANTILES, None)) if own]
    least_s = min((own.step_s for own in every), default=inf)
    return every if few else [own for own in every if own.step_s <= _NEARLY * least_s]


def _fastest(
    pipelines: PipelineTable, fleet: Fleet, limits: Limits, samples: int, quantiles: Sequence[float] | None
) -> Relaxation | None:
    """``quantiles``: of exposed sync, up to which pipelines are looked at; None: it is not counted."""
    best: Relaxation | None = None
    if not quantiles:
        return _relaxation(pipelines, limits, samples, float(pipelines.sync_s.max(initial=0.0)))
    links = Wires(fleet).byte_s
    own_links = np.where(pipelines.devices > 0, links, 0.0).max(axis=1)
    for slowest in sorted(set(links[limits.room > 0].tolist()), reverse=True):
        room: Ints = np.where(links <= slowest, limits.room, 0)
        inside = np.flatnonzero(np.all(pipelines.devices <= room, axis=1))
        if not len(inside):
            break
        # In a ring with others each goes at the pace of the slowest link.
        paced = np.where(own_links[inside] > 0, slowest / np.maximum(own_links[inside], 1e-30), 1.0)
        sync_s = pipelines.sync_s[inside] * paced
        own = replace(limits, room=room)
        for most_s in sorted({float(np.quantile(sync_s, q, method="higher")) for q in quantiles}, reverse=True):
            part = pipelines.select(inside[sync_s <= most_s])
            if best is not None and not _does(part, own, samples, best.step_s - most_s):
                continue
            found = _relaxation(part, own, samples, most_s)
            if found is not None and (best is None or found.step_s < best.step_s):
                best = found if best is None else replace(found, bound_s=best.bound_s)
    return best


def _relaxation(pipelines: PipelineTable, limits: Limits, samples: int, sync_s: float) -> Relaxation | None:
    once_s = pipelines.bottleneck_s + pipelines.filling_s
    times = shortest_s(pipelines.bottleneck_s, once_s, pipelines.sizes, pipelines.devices, limits, samples)
    if times is None:
        return None
    bound_s, about_s = times
    return Relaxation(bound_s=bound_s, pipelines_s=about_s, sync_s=sync_s, limits=limits, pipelines=pipelines)


def columns_of(relaxation: Relaxation, most: int, *, pairs: bool) -> list[int]:
    """Indices of about ``most`` of its pipelines. ``pairs``: also of the best pairs, which are many where there are many devices."""
    part, chosen = relaxation.pipelines, dict[int, None]()
    for later in _LATER:
        seconds = later * relaxation.pipelines_s
        if pairs:
            chosen.update(dict.fromkeys(_paired(part, part.capacity(seconds - part.sync_s), relaxation.limits, most)))
        capacity = part.capacity(seconds)
        if later > 1:
            capacity = np.floor(capacity / part.sizes) * part.sizes
        chosen.update(dict.fromkeys(_of_value(part, capacity, relaxation.limits, most // 4)))
    return list(chosen)


def _of_value(pipelines: PipelineTable, capacity: Floats, limits: Limits, most: int) -> Iterator[int]:
    """Those with the largest reduced values and values per device, in all and of each micro-batch size."""
    sizes = np.unique(pipelines.sizes).tolist()
    keep = best_per_devices(capacity, pipelines.devices, most=2)
    known = relaxed(capacity[keep], pipelines.devices[keep], limits)
    if known is None:
        return
    value = capacity - pipelines.devices @ known.prices
    for own in (value, value / pipelines.devices.sum(axis=1)):
        yield from keep[np.argsort(-own[keep], kind="stable")][:most].tolist()
        for size in sizes:
            which = np.flatnonzero(pipelines.sizes == size)
            which = which[best_per_devices(capacity[which], pipelines.devices[which])]
            yield from which[np.argsort(-own[which], kind="stable")][: max(1, most // len(sizes))].tolist()


def _paired(pipelines: PipelineTable, capacity: Floats, limits: Limits, most: int) -> list[int]:
    """Those of the pairs that do most together."""
    keep = best_per_devices(capacity, pipelines.devices)
    keep = keep[capacity[keep] > 0]
    devices, own = pipelines.devices[keep], capacity[keep]
    both = np.where(
        np.all(devices[:, None] + devices[None, :] <= limits.room, axis=2), own[:, None] + own[None, :], -1.0
    )
    order = np.argsort(-both, axis=None, kind="stable")[:most]
    found: list[int] = keep[np.unique(np.unravel_index(order, both.shape))].tolist()
    return found


def _does(pipelines: PipelineTable, limits: Limits, samples: int, seconds: float) -> bool:
    """Whether fractions of pipelines do more than the batch in a time."""
    capacity = pipelines.capacity(seconds)
    keep = best_per_devices(capacity, pipelines.devices)
    done = relaxed(capacity[keep], pipelines.devices[keep], limits)
    return done is not None and done.samples > samples

"""Templates of all micro-batch sizes in one table, and estimates of their exposed gradient sync."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from heterodyne.cluster.fleet import Fleet
from heterodyne.search.fleet.arrays import Floats, Ints
from heterodyne.search.fleet.counts import Limits, best_per_devices, capacities, relaxed, shortest_s
from heterodyne.search.fleet.pipeline_estimate import exposed_sync_s
from heterodyne.search.fleet.pipeline_table import MANY_DEVICES, PipelineTable
from heterodyne.search.fleet.pipeline_templates import PipelineTemplates
from heterodyne.search.fleet.plan import Template
from heterodyne.search.fleet.predict import Predictor
from heterodyne.search.fleet.tables import Table

__all__ = ["Options", "Times", "anyhow", "shown_s"]

_QUANTILES = (1.0, 0.7, 0.5, 0.35, 0.2, 0.1, 0.05)  # of what shows with each shape, up to which shapes are looked at


@dataclass(frozen=True, kw_only=True)
class Times:
    """Times of mixes of some templates, in seconds.

    Args:
        bound_s: lower bound on any mix.
        pipelines_s, shown_s: estimates for the best mix: its pipelines, and the exposed sync after them.
        limits: restricted to the pools of the mix. ``options``: templates with no more exposed sync.
    """

    bound_s: float
    pipelines_s: float
    shown_s: float
    limits: Limits
    options: Options

    @property
    def about_s(self) -> float:
        return self.pipelines_s + self.shown_s


@dataclass(frozen=True, kw_only=True)
class Options:
    """A table of templates. Arrays have one value per template; ``devices``: Shape [templates, pools]; ``numbers``: index in ``rows``."""

    predictor: Predictor
    rows: Sequence[PipelineTemplates]
    longest_s: Floats
    total_s: Floats
    sizes: Ints
    stages: Ints
    devices: Ints
    numbers: Ints

    @classmethod
    def of(cls, predictor: Predictor, rows: Sequence[PipelineTemplates]) -> Options:
        """Of at least one."""
        return cls(
            predictor=predictor,
            rows=rows,
            longest_s=np.concatenate([own.longest_s for own in rows]),
            total_s=np.concatenate([own.total_s for own in rows]),
            sizes=np.concatenate([np.full(len(own), own.micro_batch, dtype=np.int64) for own in rows]),
            stages=np.concatenate([own.stages for own in rows]),
            devices=np.concatenate([own.devices for own in rows]),
            numbers=np.arange(sum(map(len, rows))),
        )

    def times(self, limits: Limits, *, exchanged: bool) -> Times | None:
        """None if no mix keeps the limits. ``exchanged``: with exposed sync.

        A step is the longest pipeline plus the longest sync. A ring runs at the pace of its slowest link, and a stage syncs less the
        more stages there are; so pools and templates with much exposed sync are left out as long as that pays.
        """
        best: Times | None = None
        samples = self.predictor.global_batch
        links = _links_s(self.predictor.fleet)
        for slowest in sorted(set(links[limits.room > 0].tolist()), reverse=True):
            room: Ints = np.where(links <= slowest, limits.room, 0)
            own = replace(limits, room=room)
            part = self.within(np.all(self.devices <= room, axis=1))
            if not len(part.sizes):
                break
            shown = part.exchange_s(own) if exchanged else np.zeros(len(part.sizes))
            for most_s in sorted({float(np.quantile(shown, q, method="higher")) for q in _QUANTILES}, reverse=True):
                options = part.within(shown <= most_s)
                if best is not None and not options.does(samples, best.about_s - most_s, own):
                    continue
                found = shortest_s(options.longest_s, options.total_s, options.sizes, options.devices, own, samples)
                if found is not None and (best is None or found[1] + most_s < best.about_s):
                    bound_s = found[0] if best is None else best.bound_s
                    best = Times(bound_s=bound_s, pipelines_s=found[1], shown_s=most_s, limits=own, options=options)
        return best

    def does(self, samples: int, seconds: float, limits: Limits) -> bool:
        """Whether fractional pipelines do that many samples in that time."""
        capacity = capacities(self.longest_s, self.total_s, self.sizes, seconds)
        keep = best_per_devices(capacity, self.devices)
        done = relaxed(capacity[keep], self.devices[keep], limits)
        return done is not None and done.samples > samples

    def within(self, which: NDArray[np.bool_]) -> Options:
        """Some of them."""
        arrays = "longest_s", "total_s", "sizes", "stages", "devices", "numbers"
        return replace(self, **{name: getattr(self, name)[which] for name in arrays})

    def exchange_s(self, limits: Limits) -> Floats:
        """See `shown_s`; with few devices, each with its part of the layers, all that they sync."""
        if self.predictor.fleet.devices > MANY_DEVICES:
            return shown_s(self.predictor, self.stages, self.devices, self.longest_s, limits)
        table = _some_table(self.predictor)
        size = table.reduced_bytes(0, len(table.costs))
        links = np.where(self.devices > 0, _links_s(self.predictor.fleet), 0.0).max(axis=1)
        found: Floats = 2 * size * links / np.maximum(1, self.devices.sum(axis=1))
        return found

    def templates(self, chosen: Collection[int]) -> list[Template]:
        """Of some, by number."""
        starts = np.cumsum([0, *map(len, self.rows)])
        chosen = self.numbers[list(chosen)].tolist()
        made: dict[int, list[Template]] = {}
        few = self.predictor.fleet.devices <= MANY_DEVICES  # of many, each pipeline has many micro-batches
        for start, part in zip(starts.tolist(), self.rows, strict=False):
            numbers = [row for row in chosen if start <= row < start + len(part)]
            cut = part.templates((number - start for number in numbers), few=few)
            made.update(zip(numbers, cut, strict=True))
        return list(dict.fromkeys(template for row in chosen for template in made[row]))


def anyhow(rows_of: PipelineTable, limits: Limits) -> list[Times]:
    """Times of all that fits in any number of pipelines."""
    huge = rows_of.predictor.fleet.devices > MANY_DEVICES
    every = (Options.of(rows_of.predictor, rows).times(limits, exchanged=huge) for rows in rows_of.anyhow() if rows)
    return [times for times in every if times is not None]


def shown_s(predictor: Predictor, stages: Ints, devices: Ints, longest_s: Floats, limits: Limits) -> Floats:
    """Estimated exposed seconds of gradient and parameter sync of pipelines of so many stages, beside others in these pools."""
    fleet, table = predictor.fleet, _some_table(predictor)
    gradients, updated = (float(table.exchanged(what).whole[1:, -1].sum()) for what in ("gradients", "updated"))
    layers = len(table.costs)
    # Where there are fewer replicas of a stage than a node has room for, it has several stages.
    per_node = np.array([pool.devices_per_node for pool in fleet.pools])
    places = np.maximum(1, per_node * stages[:, None] // np.maximum(1, devices.sum(axis=1, keepdims=True)))
    times = np.maximum(1, np.where(devices > 0, limits.room // np.maximum(1, devices), 1))
    on_node = np.where(devices > 0, np.maximum(1, places // np.minimum(times, places)), 1).max(axis=1)
    part = np.minimum(1.0, on_node * np.ceil(layers / stages) / layers)
    each: Floats = _links_s(fleet)[limits.room > 0].max(initial=0.0) * part
    return exposed_sync_s(predictor, gradients * each, updated * each, longest_s)


def _some_table(predictor: Predictor) -> Table:
    """Gradients are the same at all widths and sizes."""
    known = (
        predictor.tables.table(pool.kind, widths, size)
        for pool in predictor.fleet.pools
        for widths in predictor.tables.costs.widths(pool.kind)
        for size in (2**n for n in range(predictor.global_batch.bit_length()))
    )
    return next(table for table in known if table is not None)


def _links_s(fleet: Fleet) -> Floats:
    """Seconds of a byte from a node of each pool to another one."""
    wires = [fleet.wire(pool, pool) for pool in fleet.pools]
    return np.array([0.0 if wire is None else 1 / wire.bandwidth_bytes_per_s for wire in wires])

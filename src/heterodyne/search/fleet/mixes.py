"""Mixes of selected templates with integer counts: alike pipelines, pairs of templates, and the solutions of a mixed integer program."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from heterodyne.plan.schedules.makespans import Makespans
from heterodyne.search.fleet.arrays import Ints
from heterodyne.search.fleet.counts import Limits, relaxed, whole
from heterodyne.search.fleet.plan import Mix, ScheduleName, Template, mix_of
from heterodyne.search.fleet.predict import Predictor
from heterodyne.search.fleet.space import Space

__all__ = ["Mixes"]

_BISECTIONS = 4
_SOONER = 0.9995
_SCHEDULE: ScheduleName = "1F1B"  # under which in-flight micro-batches are counted and pipelines fill
_ONE_BY_ONE = 8  # counts up to which every count is tried
_PAIRS = 60


@dataclass(frozen=True, kw_only=True)
class Mixes:
    """Proposes mixes; the caller evaluates them.

    Args:
        waits: False: the bottleneck rank of a pipeline is taken as never idle.
        zero: the ZeRO level at which memory is counted.
        shards: pipelines that share state; None: as many replicas as there are devices for.
    """

    predictor: Predictor
    space: Space
    waits: bool = True
    zero: int = 0
    shards: int | None = None
    _once: dict[Template, float] = field(default_factory=dict, repr=False)

    def alike(self, columns: Sequence[Template], limits: Limits) -> list[Mix]:
        """Each column alone, as many replicas as possible, some fewer, and half as many."""
        devices = limits.devices(columns)
        found: dict[Mix, None] = {}
        for template, most in zip(columns, limits.most_of(devices).tolist(), strict=True):
            for count in {*range(1, min(most, _ONE_BY_ONE) + 1), most // 2, most - 1, most}:
                if limits.least <= count <= most and count > 0:
                    found[mix_of([(template, count)])] = None
        return list(found)

    def unlike(self, columns: Sequence[Template], limits: Limits, times: tuple[float, float]) -> Iterator[Mix]:
        """Integer counts over all columns that could finish between two times, in seconds."""
        devices = limits.devices(columns)
        most = [self._room(t, limits) for t in columns]
        for once in ([0.0] * len(columns), self._once_s(columns)):
            yield from self._bisected(columns, devices, once, most, limits, times)

    def _capacity(
        self, columns: Sequence[Template], once: Sequence[float], most: Sequence[int], seconds: float
    ) -> list[int]:
        """Samples in a time, of which a column does nothing in ``once``."""
        played = map(self._makespans, columns)
        return [
            t.micro_batch * own.most_bound(seconds - extra, top)
            for t, own, extra, top in zip(columns, played, once, most, strict=True)
        ]

    def worth_most(self, columns: Sequence[Template], limits: Limits, seconds: float) -> list[Template]:
        """The columns of the highest reduced value, for the mixed integer program."""
        devices = limits.devices(columns)
        capacity = np.array(
            [t.micro_batch * self._most(t, seconds, self._room(t, limits)) for t in columns],
            dtype=float,
        )
        known = relaxed(capacity, devices, limits)
        if known is None:
            return list(columns[: self.space.columns])
        worth = capacity - devices @ known.prices
        kept = np.sort(np.argsort(-worth, kind="stable")[: self.space.columns])
        return [columns[int(number)] for number in kept]

    def pairs(self, columns: Sequence[Template], limits: Limits, known_s: float) -> list[Mix]:
        """Mixes of two columns that could finish in a given time, the largest capacity first.

        A mixed integer program gives one mix per time; where gradient sync decides, another one may be the best.
        """
        devices = limits.devices(columns)
        once = self._once_s(columns)
        items = []
        for number, (template, most) in enumerate(zip(columns, limits.most_of(devices).tolist(), strict=True)):
            counts = sorted({*range(1, min(most, _ONE_BY_ONE) + 1), *(most * n // 8 for n in range(1, 9))} - {0})
            top = self._room(template, limits)
            times = [known_s, known_s - 0.5 * once[number]]
            done = [template.micro_batch * self._most(template, seconds, top) for seconds in times]
            items += [(number, count, count * done[0], count * done[1]) for count in counts]
        if not items:
            return []  # nothing is left that the budget or the devices allow
        column, count, could, does = (np.array([item[n] for item in items]) for n in range(4))
        need = devices[column] * count[:, None]
        fits = np.all(need[:, None, :] + need[None, :, :] <= limits.room, axis=2)
        fits &= could[:, None] + could[None, :] >= self.predictor.global_batch
        fits &= (column[:, None] < column[None, :]) & (count[:, None] + count[None, :] >= limits.least)
        if limits.most is not None:
            fits &= count[:, None] + count[None, :] <= limits.most
        a, b = np.nonzero(fits)
        order = np.argsort(-(does[a] + does[b]), kind="stable")[:_PAIRS]
        return [
            mix_of([(columns[column[i]], int(count[i])), (columns[column[j]], int(count[j]))])
            for i, j in zip(a[order], b[order], strict=True)
        ]

    def _makespans(self, template: Template) -> Makespans:
        return self.predictor.pipeline_time.makespans(template, _SCHEDULE, self.space.layouts[-1])

    def _most(self, template: Template, seconds: float, top: int) -> int:
        """Micro-batches in a time, at most."""
        if self.waits:
            return self._makespans(template).most_bound(seconds, top)
        done = seconds / self.predictor.pipeline_time.longest_s(template)
        return int(min(top, done)) if done > 0 else 0  # nor where either never ends

    def _bisected(
        self,
        columns: Sequence[Template],
        devices: Ints,
        once: Sequence[float],
        most: Sequence[int],
        limits: Limits,
        times: tuple[float, float],
    ) -> Iterator[Mix]:
        """Mixes that do most in times that come near the one in which the batch is just done. ``once``: seconds of each column that
        no micro-batch is done in.
        """
        low, high = times
        at_s = high * _SOONER
        for _ in range(_BISECTIONS):
            capacity = self._capacity(columns, once, most, at_s)
            counts = whole(capacity, devices, limits)
            if counts is None:
                return
            mix = mix_of((t, n) for t, n in zip(columns, counts, strict=True))
            if mix:
                yield mix
            if sum(c * n for c, n in zip(capacity, counts, strict=True)) >= self.predictor.global_batch:
                high = at_s
            elif high == times[1]:
                return
            else:
                low = at_s
            at_s = (low + high) / 2

    def _room(self, template: Template, limits: Limits) -> int:
        """Micro-batches for which there is memory at the level."""
        shards = self.shards or max(1, int(limits.most_of(limits.devices([template]))[0]))
        return self.predictor.pipeline_memory.most_micro_batches(template, _SCHEDULE, shards, self.zero)

    def _once_s(self, columns: Sequence[Template]) -> list[float]:
        """About what shows of the gradients of each column beside others like it, in the better layout."""
        found = []
        for template in columns:
            if template not in self._once:
                most = min(self.predictor.fleet.pool(pool).devices // need for pool, need in template.devices.items())
                self._once[template] = min(
                    self.predictor.sync_and_update_s(((template, most),), layout, self.space.zero[0])[0]
                    for layout in self.space.layouts
                )
            found.append(self._once[template])
        return found

"""Every plan over a small fleet: what the search is measured against.

All rows of places in which a pool's places follow each other at one width, with any number of stages on each, all cuts, and what is
recomputed of each place; all multisets of these pipelines; every layout and schedule. Plans are passed over only where pipelines that
wait no more than they must would be no faster than one that is known; the work still grows so fast that half a dozen devices are the most.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import combinations, pairwise, permutations, product
from math import inf

from heterodyne.plan.schedules.bounds import place_lines
from heterodyne.search.fleet.kinds import Kind, kinds_of
from heterodyne.search.fleet.plan import INTERLEAVED, SPLIT, Template, mix_of, suits
from heterodyne.search.fleet.search import Search
from pure.search.fleet.small import stage_of

__all__ = ["Exhaustive"]

_SOONER = 1 - 1e-9
Devices = tuple[int, ...]
Ways = list[tuple[Template, int]]
"""Templates over the same devices, with the samples that each could do before the best plan that is known."""


@dataclass(kw_only=True)
class Exhaustive:
    """Tries every plan in the space of a `Search`. ``known_s``: the step of a plan that is known; only faster ones are looked for.

    ``every_kind``: stages too in which another way to share them is better in all.
    """

    search: Search
    known_s: float = inf
    every_kind: bool = False
    _lines: dict[Template, list[tuple[float, float]]] = field(default_factory=dict, repr=False)

    def shortest_s(self) -> float:
        """The step of the fastest plan, or ``known_s``."""
        by_devices: dict[Devices, Ways] = {}
        most = min(self.search.fleet.devices, self.search.space.max_pipelines or self.search.fleet.devices)
        for template in self.templates():
            could = self._could(template)
            if could and self._fits(template, most):  # else it would have nothing to do in a faster plan
                by_devices.setdefault(self._devices(template), []).append((template, could))
        room = tuple(pool.devices for pool in self.search.fleet.pools)
        parts = [[by_devices[d] for d in part] for part in _partitions(sorted(by_devices), room)]
        parts.sort(key=lambda part: (-sum(max(could for _, could in ways) for ways in part), len(part)))
        for part in parts:
            self._try([], 0, part)
        return self.known_s

    def templates(self) -> Iterator[Template]:
        """Every pipeline for which there are devices, whether it fits or not."""
        search = self.search
        interleaved = not INTERLEAVED.isdisjoint(search.space.schedules)
        for size in search.kinds.sizes:
            kinds = kinds_of(search.fleet, search.tables, size, search.space, every=self.every_kind)
            for row in self._rows(kinds):
                layers = min(len(row[0].table.costs), search.space.max_stages)
                most_chunks = min(search.space.max_chunks, layers // len(row)) if interleaved and len(row) > 1 else 1
                for chunks in range(1, most_chunks + 1):
                    yield from self._cuts(row, size, chunks)

    def _cuts(self, row: Sequence[Kind], size: int, chunks: int) -> Iterator[Template]:
        layers = len(row[0].table.costs)
        needed: dict[tuple[int, tuple[tuple[int, int], ...]], tuple[bool, ...]] = {}
        for cut in combinations(range(1, layers), chunks * len(row) - 1):
            spans = tuple(pairwise((0, *cut, layers)))
            ways = []
            for place, kind in enumerate(row):
                key = place, spans[place :: len(row)]
                if key not in needed:
                    needed[key] = self._again(kind, key[1])
                ways.append(needed[key])
            for flags in product(*ways):
                stages = tuple(
                    stage_of(kind, a, b, recompute=flag)
                    for kind, (a, b), flag in zip([*row] * chunks, spans, [*flags] * chunks, strict=True)
                )
                yield Template(micro_batch=size, stages=stages, chunks=chunks)

    def _rows(self, kinds: Sequence[Kind]) -> Iterator[list[Kind]]:
        pools = self.search.fleet.pools
        layers = len(self.search.tables.costs.layers)
        for count in range(1, min(len(pools), self.search.space.max_pools or len(pools)) + 1):
            for chosen in permutations(kinds, count):
                if len({kind.pool for kind in chosen}) < count:
                    continue
                lengths = [range(1, pools[kind.pool].devices // kind.devices + 1) for kind in chosen]
                for runs in product(*lengths):
                    if sum(runs) <= min(layers, self.search.space.max_stages):
                        yield [kind for kind, run in zip(chosen, runs, strict=True) for _ in range(run)]

    def _again(self, kind: Kind, spans: Sequence[tuple[int, int]]) -> tuple[bool, ...]:
        """Whether a place may be recomputed; not where it fits as it is at every level, for any number of micro-batches."""
        if not self.search.space.recompute:
            return (False,)
        need = max(
            sum(
                kind.table.memory(
                    start, stop, recompute=False, held=self.search.predictor.global_batch, replicas=n, zero=zero
                ).total
                for start, stop in spans
            )
            for zero in self.search.space.zero
            for n in (1, 2)
        )
        return (False,) if need <= kind.memory_bytes else (False, True)

    def _fits(self, template: Template, replicas: int) -> bool:
        """Whether there is memory for a micro-batch, where any number of pipelines up to so many share state at any level."""
        # Beside pipelines with several stages on each place, one with a single stage runs under their schedules.
        return any(
            self.search.predictor.pipeline_memory.fits(template, 1, schedule, shared, zero)
            for schedule in self.search.space.schedules
            if template.chunks == 1 or suits(schedule, [template])
            for zero in reversed(self.search.space.zero)
            for shared in {1, replicas}
        )

    def _devices(self, template: Template) -> Devices:
        return tuple(template.devices.get(pool.name, 0) for pool in self.search.fleet.pools)

    def _try(self, chosen: list[Template], could: int, left: Sequence[Ways]) -> None:
        """``could``: samples that what is chosen could do before the best that is known."""
        if not left:
            self._weigh(chosen)
            return
        rest = sum(max(own for _, own in ways) for ways in left[1:])
        options = left[0]
        for number, (template, own) in enumerate(options):
            if could + own + rest >= self.search.predictor.global_batch:
                # Of pipelines over as many devices the order does not matter.
                self._try([*chosen, template], could + own, _after(options, number, left))

    def _weigh(self, chosen: Sequence[Template]) -> None:
        search, mix = self.search, mix_of((template, 1) for template in chosen)
        if len(chosen) > 1:
            sync_and_update_s = search.predictor.least_sync_and_update_s(mix, search.space.layouts, search.space.zero)
            if sum(self._could(template, sync_and_update_s) for template in chosen) < search.predictor.global_batch:
                return
        weighed = search.evaluate(mix, self.known_s)
        if weighed is not None:
            self.known_s = min(self.known_s, weighed.predicted.step_s)

    def _could(self, template: Template, sync_and_update_s: float = 0.0) -> int:
        """Samples before the best plan that is known, at most. ``sync_and_update_s``: seconds of that in which pipelines are done."""
        if self.known_s == inf:
            return self.search.predictor.global_batch
        seconds = self.known_s * _SOONER - sync_and_update_s
        rounds = min(int((seconds - a) / e) if seconds > a else 0 for a, e in self._lines_of(template))
        return template.micro_batch * rounds

    def _lines_of(self, template: Template) -> list[tuple[float, float]]:
        """With messages as in the layout in which each takes less, under whichever schedule it waits least."""
        if template in self._lines:
            return self._lines[template]
        space, predictor = self.search.space, self.search.predictor
        split = any(s in SPLIT for s in space.schedules if template.chunks == 1 or s in INTERLEAVED)
        ways = [predictor.pipeline_time.makespans(template, "1F1B", layout) for layout in space.layouts]
        sends = [min(own) for own in zip(*(way.sends for way in ways), strict=True)]
        self._lines[template] = place_lines(ways[0].stages, sends, template.places, split=split)
        return self._lines[template]


def _after(options: Ways, number: int, left: Sequence[Ways]) -> list[Ways]:
    """The parts that are left after one of several alike ones: each may take what comes from ``number`` on."""
    after = options[number:]
    return [after if part is options else part for part in left[1:]]


def _partitions(parts: Sequence[Devices], room: Devices, first: int = 0) -> Iterator[tuple[Devices, ...]]:
    """Every multiset of parts that fits into the room, but the empty one."""
    for number in range(first, len(parts)):
        left = tuple(have - need for have, need in zip(room, parts[number], strict=True))
        if min(left) >= 0:
            yield (parts[number],)
            for rest in _partitions(parts, left, number):
                yield (parts[number], *rest)

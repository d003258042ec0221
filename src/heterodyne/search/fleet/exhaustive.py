"""Every plan over a small fleet: what the search is measured against.

All rows of stages in which a pool's stages follow each other at one width, with all cuts; all multisets of these pipelines; every
layout and schedule. Plans are passed over only where pipelines that never wait, and exchange nothing, would be no faster than one
that is known; the work still grows so fast that half a dozen devices are the most.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import combinations, pairwise, permutations, product
from math import inf

from heterodyne.search.fleet.plan import Template
from heterodyne.search.fleet.predict import mix_of
from heterodyne.search.fleet.search import Search
from heterodyne.search.fleet.shapes import Kind, kinds_of

__all__ = ["Exhaustive"]

Devices = tuple[int, ...]


@dataclass(kw_only=True)
class Exhaustive:
    """Tries every plan in the space of a `Search`. ``known_s``: the step of a plan that is known; only faster ones are looked for.

    ``every_kind``: stages too in which another way to share them is better in all.
    """

    search: Search
    known_s: float = inf
    every_kind: bool = False
    _seconds: dict[Template, tuple[tuple[float, float], ...]] = field(default_factory=dict)

    def shortest_s(self) -> float:
        """The step of the fastest plan, or ``known_s``."""
        by_devices: dict[Devices, list[Template]] = {}
        for template in self.templates():
            by_devices.setdefault(self._devices(template), []).append(template)
        room = tuple(pool.devices for pool in self.search.fleet.pools)
        parts = sorted(
            (self._bound_s([by_devices[d] for d in part]), part) for part in _partitions(sorted(by_devices), room)
        )
        for bound_s, part in parts:
            if bound_s >= self.known_s:
                break
            self._try([], [by_devices[d] for d in part])
        return self.known_s

    def templates(self) -> Iterator[Template]:
        """Every pipeline for which there are devices and memory."""
        search = self.search
        most = min(search.fleet.devices, search.space.max_pipelines or search.fleet.devices)
        for size in search.sizes:
            kinds = kinds_of(search.fleet, search.tables, size, search.space, every=self.every_kind)
            for row in self._rows(kinds):
                layers = len(row[0].table.costs)
                for cut in combinations(range(1, layers), len(row) - 1):
                    spans = list(pairwise((0, *cut, layers)))
                    again = (False, True) if search.space.recompute else (False,)
                    for flags in product(again, repeat=len(row)):
                        template = Template(
                            micro_batch=size,
                            stages=tuple(
                                kind.stage(a, b, recompute=flag)
                                for kind, (a, b), flag in zip(row, spans, flags, strict=True)
                            ),
                        )
                        if self._most(template, most) > 0 and not self._in_vain(template):
                            yield template

    def _rows(self, kinds: Sequence[Kind]) -> Iterator[list[Kind]]:
        pools = self.search.fleet.pools
        layers = len(self.search.tables.costs.layers)
        for count in range(1, min(len(pools), self.search.space.max_pools) + 1):
            for chosen in permutations(kinds, count):
                if len({kind.pool for kind in chosen}) < count:
                    continue
                lengths = [range(1, pools[kind.pool].devices // kind.devices + 1) for kind in chosen]
                for runs in product(*lengths):
                    if sum(runs) <= min(layers, self.search.space.max_stages):
                        yield [kind for kind, run in zip(chosen, runs, strict=True) for _ in range(run)]

    def _in_vain(self, template: Template) -> bool:
        """Whether a stage is recomputed that fits as it is at every level, for any number of micro-batches."""
        for number, stage in enumerate(template.stages):
            if stage.recompute:
                own = self.search.predictor.stage_tables(template)[number]
                need = max(
                    own.memory(
                        stage.start,
                        stage.stop,
                        recompute=False,
                        held=self.search.predictor.global_batch,
                        replicas=replicas,
                        zero=zero,
                    ).total
                    for zero in self.search.space.zero
                    for replicas in (1, 2)
                )
                if need <= self.search.fleet.pool(stage.pool).memory_bytes:
                    return True
        return False

    def _most(self, template: Template, replicas: int) -> int:
        """Where any number of pipelines up to so many share state at any level."""
        return max(
            self.search.predictor.most_micro_batches(template, schedule, shared, zero)
            for schedule in self.search.space.schedules
            for zero in self.search.space.zero
            for shared in {1, replicas}
        )

    def _devices(self, template: Template) -> Devices:
        return tuple(template.devices.get(pool.name, 0) for pool in self.search.fleet.pools)

    def _try(self, chosen: list[Template], left: Sequence[Sequence[Template]]) -> None:
        if not left:
            mix = mix_of((template, 1) for template in chosen)
            weighed = self.search.weigh(mix)
            if weighed is not None:
                self.known_s = min(self.known_s, weighed.predicted.step_s)
            return
        options = left[0]
        ranked = sorted(
            (self._bound_s([*([t] for t in chosen), [template], *left[1:]]), number)
            for number, template in enumerate(options)
        )
        for bound_s, number in ranked:
            if bound_s >= self.known_s:
                break
            # Of pipelines over as many devices the order does not matter.
            self._try([*chosen, options[number]], _after(options, number, left))

    def _bound_s(self, parts: Sequence[Sequence[Template]]) -> float:
        """No plan with one pipeline out of each part is faster."""
        samples = self.search.predictor.global_batch
        low, high = 0.0, self.known_s if self.known_s < inf else 1e9
        if self._done(parts, high) < samples:
            return high
        for _ in range(30):
            middle = (low + high) / 2
            if self._done(parts, middle) < samples:
                low = middle
            else:
                high = middle
        return low

    def _done(self, parts: Sequence[Sequence[Template]], seconds: float) -> float:
        total = 0.0
        known: dict[int, float] = {}
        for part in parts:
            if id(part) not in known:
                known[id(part)] = max((self._capacity(template, seconds) for template in part), default=0.0)
            total += known[id(part)]
        return total

    def _capacity(self, template: Template, seconds: float) -> float:
        if template not in self._seconds:
            tables = self.search.predictor.stage_tables(template)
            around, lines = 0.0, []
            for stage, table in zip(template.stages, tables, strict=True):
                each = table.forward_s(stage.start, stage.stop)
                each += table.backward_s(stage.start, stage.stop, stage.recompute)
                lines.append((around, each))
                around += each
            self._seconds[template] = tuple(lines)
        lines_of = self._seconds[template]
        return template.micro_batch * max(0, int(min((seconds - a) / e for a, e in lines_of) * (1 + 1e-12)))


def _after(options: Sequence[Template], number: int, left: Sequence[Sequence[Template]]) -> list[Sequence[Template]]:
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

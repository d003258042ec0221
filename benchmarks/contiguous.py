"""Every plan of alike pipelines in which the stages of a kind of device follow each other at one tensor width.

Every order of the kinds, every number of stages up to a limit, every width, size of micro-batches, number of pipelines and cut. A stage is
recomputed where it does not fit otherwise, at the highest level of state sharding. What is passed over could not be done before the best
plan that is known if its places only ever waited for what they must (`plan.schedules.bounds`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import permutations, product
from math import ceil

from heterodyne.cost.layers import Widths
from heterodyne.search.fleet.kinds import Kind
from heterodyne.search.fleet.plan import INTERLEAVED, Candidate, ScheduleName, Template
from heterodyne.search.fleet.search import Search

__all__ = ["Contiguous"]


@dataclass(kw_only=True)
class Contiguous:
    """Searches the space of a `Search`. ``best``: a plan that is known; only faster ones are looked for.

    Args:
        kinds: of devices in one pipeline, at most.
    """

    search: Search
    best: Candidate | None
    max_stages: int = 8
    kinds: int = 3
    weighed: int = 0

    def run(self) -> Candidate | None:
        """The fastest of them, or the plan that is known."""
        for rows in self._rows():
            self._alike(*rows)
        return self.best

    @property
    def _known_s(self) -> float:
        return float("inf") if self.best is None else self.best.predicted.step_s * (1 - 1e-9)

    @property
    def _schedules(self) -> tuple[ScheduleName, ...]:
        return tuple(name for name in self.search.space.schedules if name not in INTERLEAVED)

    def _rows(self) -> Iterator[tuple[list[Kind], int]]:
        search = self.search
        for size in search.kinds.sizes:
            widths = {pool.name: self._widths(pool.name, size) for pool in search.fleet.pools}
            for count in range(1, min(self.kinds, len(search.fleet.pools)) + 1):
                for pools in permutations(search.fleet.pools, count):
                    for kinds in product(*(widths[pool.name] for pool in pools)):
                        lengths = [
                            range(1, min(self.max_stages, p.devices // k.devices) + 1)
                            for p, k in zip(pools, kinds, strict=True)
                        ]
                        for runs in product(*lengths):
                            if sum(runs) <= self.max_stages:
                                yield [k for k, run in zip(kinds, runs, strict=True) for _ in range(run)], size

    def _widths(self, name: str, size: int) -> list[Kind]:
        """Tensor parallelism in a node, and nothing else."""
        number, pool = next((n, pool) for n, pool in enumerate(self.search.fleet.pools) if pool.name == name)
        found = []
        for widths in self.search.tables.costs.widths(pool.kind):
            table = self.search.tables.table(pool.kind, widths, size)
            if widths == Widths(tensor=widths.tensor) and pool.devices_per_node % widths.tensor == 0 and table:
                memory = float(pool.memory_bytes)
                found.append(Kind(pool=number, name=name, widths=widths, memory_bytes=memory, table=table))
        return found

    def _alike(self, row: list[Kind], size: int) -> None:
        """Fewer pipelines have more to do each, so where none of some number is fast enough, none of fewer is."""
        search = self.search
        need: dict[int, int] = {}
        for kind in row:
            need[kind.pool] = need.get(kind.pool, 0) + kind.devices
        most = min(search.fleet.pools[pool].devices // devices for pool, devices in need.items())
        for count in range(most, 0, -1):
            if not self._tried(row, size, count):
                return

    def _tried(self, row: list[Kind], size: int, count: int) -> bool:
        """Whether some cut could be fast enough."""
        rounds = ceil(self.search.predictor.global_batch / (size * count))
        layers = len(row[0].table.costs)
        if len(row) > layers:
            return False
        by_pool = {kind.pool: self._reach(kind, self._known_s / rounds) for kind in row}
        reach = [by_pool[kind.pool] for kind in row]
        if sum(reach) < layers:
            return False
        behind = [sum(reach[place + 1 :]) for place in range(len(row))]
        found = False
        for points in self._cuts(row, rounds, behind, 0, (0,), 0.0):
            found = True
            template = self._template(row, size, points, count)
            if template is not None:
                self.weighed += 1
                weighed = self.search.evaluate(((template, count),), self._known_s, self._schedules)
                if weighed is not None and weighed.predicted.step_s < self._known_s:
                    self.best = weighed
        return found

    def _reach(self, kind: Kind, seconds: float) -> int:
        """The most layers that a stage has which does a micro-batch in a time."""
        forward, backward, _ = kind.table.passes
        whole, layers = (forward + backward).tolist(), len(kind.table.costs)
        most, stop = 0, 0
        for start in range(layers):
            while stop < layers and whole[stop + 1] - whole[start] <= seconds:
                stop += 1
            most = max(most, stop - start)
        return most

    def _cuts(
        self,
        row: Sequence[Kind],
        rounds: int,
        behind: Sequence[int],
        place: int,
        points: tuple[int, ...],
        around: float,
    ) -> Iterator[tuple[int, ...]]:
        """``behind``: layers that the places behind each one have at most; ``around``: what a micro-batch takes before this place, there
        and back, under schedules that never halve its backward; its forward only, under those that do.
        """
        kind, layers, start = row[place], len(row[0].table.costs), points[-1]
        left = len(row) - place - 1
        last = place == len(row) - 1
        for stop in (layers,) if last else range(max(start + 1, layers - behind[place]), layers - left + 1):
            forward = kind.table.forward_s(start, stop)
            each = forward + kind.table.backward_s(start, stop, False)
            if around + rounds * each >= self._known_s:
                break
            if last:
                yield (*points, stop)
            else:
                yield from self._cuts(row, rounds, behind, place + 1, (*points, stop), around + forward)

    def _template(self, row: Sequence[Kind], size: int, points: Sequence[int], count: int) -> Template | None:
        """None where it does not fit."""
        search, space = self.search, self.search.space
        rounds = ceil(search.predictor.global_batch / (size * count))
        stages = []
        for place, kind in enumerate(row):
            start, stop = points[place], points[place + 1]
            held = min(len(row) - place, rounds)
            for again in (False, True) if space.recompute else (False,):
                need = kind.table.memory(
                    start, stop, recompute=again, held=held, replicas=count, zero=max(space.zero)
                ).total
                if need <= kind.memory_bytes:
                    stages.append(kind.stage(start, stop, recompute=again))
                    break
            else:
                return None
        return Template(micro_batch=size, stages=tuple(stages))

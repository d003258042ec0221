"""The stage kinds of a search, by micro-batch size. Cached."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from math import inf

from heterodyne.cost.layers import Widths
from heterodyne.search.fleet.kinds import Kind, kinds_of
from heterodyne.search.fleet.predict import Predictor
from heterodyne.search.fleet.space import Space

__all__ = ["StageKinds"]

_SOONER = 0.98  # seconds of a sample, for which a larger micro-batch is worth to be waited for


@dataclass(frozen=True, kw_only=True)
class StageKinds:
    """Stage kinds of one search space."""

    predictor: Predictor
    space: Space
    _kinds: dict[int, tuple[Kind, ...]] = field(default_factory=dict)

    @property
    def few(self) -> bool:
        """Whether integer effects of the number of devices matter."""
        return self.predictor.fleet.devices <= self.space.few_devices

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Micro-batch sizes for which costs are known."""
        most = self.predictor.global_batch
        wanted = self.space.micro_batches or self._usual(most)
        kinds = {
            (pool.kind, widths)
            for pool in self.predictor.fleet.pools
            for widths in self.predictor.tables.costs.widths(pool.kind)
        }
        known: list[int] = []
        for size in sorted(wanted):
            tables = (self.predictor.tables.table(kind, widths, size) for kind, widths in sorted(kinds))
            if size <= most and any(table is not None and table.may_stand_alone for table in tables):
                if known and not self._holds(size):
                    break  # what is larger needs no less memory
                known.append(size)
        return tuple(known)

    def _usual(self, most: int) -> tuple[int, ...]:
        """Powers of two; where integer effects matter also the size with which few devices have equal shares."""
        even = {most // n for n in range(1, self.predictor.fleet.devices + 1) if most % n == 0} if self.few else set()
        return tuple(sorted({*(2**n for n in range(most.bit_length())), *even}))

    def _holds(self, size: int) -> bool:
        """Whether each layer has a stage kind with memory for one micro-batch, with state fully sharded."""
        layers, most, zero = self.predictor.tables.costs.layers, self.most_pipelines, max(self.space.zero)
        return all(
            any(
                kind.table.memory(n, n + 1, recompute=again, held=1, replicas=most, zero=zero).total
                <= kind.memory_bytes
                for kind in self.of(size)
                for again in {False, self.space.recompute}
            )
            for n in map(layers.index, dict.fromkeys(layers))
        )

    @property
    def every(self) -> Mapping[int, tuple[Kind, ...]]:
        """All kinds, by micro-batch size; over many devices larger ones only where they are faster."""
        found: dict[int, tuple[Kind, ...]] = {}
        least: dict[tuple[str, Widths], float] = {}
        for size in self.sizes:
            kept = []
            for kind in self.of(size):
                layers = len(kind.table.costs)
                each_s = (kind.table.forward_s(0, layers) + kind.table.backward_s(0, layers, False)) / size
                if self.few or each_s < _SOONER * least.get((kind.name, kind.widths), inf):
                    least[kind.name, kind.widths] = each_s
                    kept.append(kind)
            found[size] = tuple(kept)
        return found

    def of(self, size: int) -> tuple[Kind, ...]:
        """The kinds at a micro-batch size."""
        if size not in self._kinds:
            self._kinds[size] = kinds_of(self.predictor.fleet, self.predictor.tables, size, self.space)
        return self._kinds[size]

    def widths(self, pool: str, size: int) -> tuple[Widths, ...]:
        """The widths of stages in a pool at a micro-batch size."""
        return tuple(kind.widths for kind in self.of(size) if kind.name == pool)

    @property
    def most_pipelines(self) -> int:
        """The largest number of pipelines that shard state."""
        if max(self.space.zero) < 1:
            return 1
        return min(self.predictor.fleet.devices, self.space.max_pipelines or self.predictor.fleet.devices)

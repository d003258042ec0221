"""The templates that a search chooses from: for every micro-batch size, with state sharded over more and more pipelines. Cached."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import inf

import numpy as np

from heterodyne.cost.layers import Widths
from heterodyne.search.fleet.kinds import Kind, kinds_of
from heterodyne.search.fleet.pipeline_templates import PipelineTemplates, shapes
from heterodyne.search.fleet.predict import Predictor
from heterodyne.search.fleet.space import Space
from heterodyne.search.fleet.stage_costs import Sharing

__all__ = ["MANY_DEVICES", "Levels", "PipelineTable"]

MANY_DEVICES = 512
"""Of a fleet, from which on a search has to do with fewer kinds of rows."""
Levels = tuple[int, ...]
"""Of state sharding."""
_SHARDS = (2, 3, 4, 6, 8, 16)  # parts of the state that is shared
_SHARDS_OF_MANY = (8, 64)
_SHARDS_OF_MORE = (8,)
_SOONER = 0.98  # seconds of a sample, for which a larger micro-batch is worth to be waited for


@dataclass(frozen=True, kw_only=True)
class PipelineTable:
    """Templates of one search space."""

    predictor: Predictor
    space: Space
    _shapes: dict[tuple[Levels, int, int | None], list[PipelineTemplates]] = field(default_factory=dict)
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
                for kind in self.kinds(size)
                for again in {False, self.space.recompute}
            )
            for n in map(layers.index, dict.fromkeys(layers))
        )

    def widths(self, pool: str, size: int) -> tuple[Widths, ...]:
        return tuple(kind.widths for kind in self.kinds(size) if kind.name == pool)

    def kinds(self, size: int) -> tuple[Kind, ...]:
        if size not in self._kinds:
            self._kinds[size] = kinds_of(self.predictor.fleet, self.predictor.tables, size, self.space)
        return self._kinds[size]

    def of(self, zero: Levels, shards: int, least: int | None = None) -> list[PipelineTemplates]:
        """Templates of each micro-batch size (see `Sharing`)."""
        sharing = Sharing(replicas=shards, zero=zero, least=least, network=self.predictor.network)
        key = zero, shards, least if max(zero) > 1 else None
        if key not in self._shapes:
            self._shapes[key] = list(
                shapes(
                    self.predictor.fleet,
                    self.worthwhile(),
                    global_batch=self.predictor.global_batch,
                    sharing=sharing,
                    space=self.space,
                ).values()
            )
        return self._shapes[key]

    def worthwhile(self) -> dict[int, tuple[Kind, ...]]:
        """Kinds by micro-batch size; wider ones only where they are faster."""
        every = {size: self.kinds(size) for size in self.sizes}
        if self.predictor.fleet.devices <= MANY_DEVICES:
            return every
        found = {}
        least: dict[tuple[str, Widths], float] = {}
        for size, kinds in every.items():
            kept = []
            for kind in kinds:
                layers = len(kind.table.costs)
                own = (kind.table.forward_s(0, layers) + kind.table.backward_s(0, layers, False)) / size
                if own < _SOONER * least.get((kind.name, kind.widths), inf):
                    least[kind.name, kind.widths] = own
                    kept.append(kind)
            found[size] = tuple(kept)
        return found

    def levels(self) -> list[tuple[Levels, int]]:
        """Pairs of ZeRO levels and number of shards that help, the least traffic first."""
        most = self.most_pipelines
        found: list[tuple[Levels, int]] = [((self.low,), 1)]
        if self.predictor.fleet.devices > MANY_DEVICES:
            # There are many pipelines, and of a state in so many parts little is left; whole numbers hardly matter.
            found = [*(((self.low,), n) for n in _SHARDS_OF_MORE if n <= most), *found]
            return [*found, *((self.high, n) for n in _SHARDS_OF_MORE if self.high and n <= most)]
        alone = self.of((self.low,), 1, least=1)
        if all(_same(alone, rows) for rows in self.anyhow()):
            return found
        if self.few:
            parts = [n for n in _SHARDS if n <= most]
            found += [((self.low,), n) for n in parts]
            copies = any(
                w.copies > 1
                for pool in self.predictor.fleet.pools
                for w in self.predictor.tables.costs.widths(pool.kind)
            )
            return found + [((level,), n) for n in ([1, *parts] if copies else parts) for level in self.high]
        parts = [n for n in _SHARDS_OF_MANY if n <= most]
        return [*found, *(((self.low,), n) for n in parts), *((self.high, n) for n in parts[:1] if self.high)]

    def anyhow(self) -> list[list[PipelineTemplates]]:
        """All that fits in any number of pipelines: with least traffic, and at levels with traffic in every micro-batch."""
        most = self.most_pipelines
        if not self.few:
            return [self.of((self.low, *self.high), most)]
        return [self.of(levels, most) for levels in ((self.low,), self.high) if levels]

    @property
    def low(self) -> int:
        """1, which fits wherever 0 does; 0 where level 1 is excluded, which is all that a single pipeline can do."""
        return 1 if 1 in self.space.zero else 0

    @property
    def high(self) -> Levels:
        """The levels with traffic in every micro-batch."""
        return tuple(level for level in self.space.zero if level > 1)

    @property
    def most_pipelines(self) -> int:
        """The largest number of pipelines that shard state."""
        if max(self.space.zero) < 1:
            return 1
        return min(self.predictor.fleet.devices, self.space.max_pipelines or self.predictor.fleet.devices)


def _same(some: Sequence[PipelineTemplates], others: Sequence[PipelineTemplates]) -> bool:
    """Whether no shape is faster among the others."""
    return len(some) == len(others) and all(
        len(one) == len(other) and np.allclose(one.longest_s, other.longest_s, rtol=1e-9, atol=0)
        for one, other in zip(some, others, strict=True)
    )

"""Stage kinds: a number of devices of one pool, and how they divide the work of a stage.

Alike devices are one kind, so the number of pipelines grows with kinds and not with devices. Dominated kinds are dropped.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import inf
from operator import attrgetter

import numpy as np

from heterodyne.cluster.fleet import Fleet, Pool
from heterodyne.cost.layers import LayerCost, Widths
from heterodyne.search.fleet.predict import Predictor
from heterodyne.search.fleet.space import Space
from heterodyne.search.fleet.tables import Table, Tables

__all__ = ["Kind", "StageKinds", "kinds_of", "undominated", "usable_widths"]

_NO_WORSE = attrgetter(
    "forward_s", "backward_s", "recompute_s", "update_s", "parameter_bytes", "gradient_bytes", "optimizer_bytes", "kept_bytes",
    "kept_bytes_recomputed", "workspace_bytes", "output_bytes", "expert_bytes",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A stage's devices: a number of devices of one pool with their parallel widths. ``pool``: its index in the fleet."""

    pool: int
    name: str
    widths: Widths
    memory_bytes: float
    table: Table

    @property
    def devices(self) -> int:
        return self.widths.devices

    @cached_property
    def layer_s(self) -> tuple[float, float, float]:
        """Seconds of forward, backward and recompute of a layer, in the mean."""
        forward, backward, recomputed = (float(own[-1]) / len(self.table.costs) for own in self.table.passes)
        return forward, backward, recomputed


def kinds_of(fleet: Fleet, tables: Tables, micro_batch: int, space: Space, *, every: bool = False) -> tuple[Kind, ...]:
    """Every pool with every width that divides its nodes (`usable_widths`), without dominated ones (`undominated`) unless ``every``."""
    layers = dict.fromkeys(tables.costs.layers)
    first = [tables.costs.layers.index(layer) for layer in layers]
    found: list[Kind] = []
    for number, pool in enumerate(fleet.pools):
        if space.pools is not None and pool.name not in space.pools:
            continue
        own = []
        for widths in usable_widths(tables.costs.widths(pool.kind), pool.devices_per_node):
            limits = (space.max_width, space.max_context, space.max_data)
            if any(width > limit for width, limit in zip(widths, limits, strict=True)):
                continue
            if widths.devices > pool.devices or not _connected(fleet, pool, widths.devices):
                continue
            table = tables.table(pool.kind, widths, micro_batch)
            # Over several nodes micro-batches alone are not shared, unless a node is one device: it would be further replicas.
            beyond = widths.devices > pool.devices_per_node > 1
            runs = table is not None and (not space.runnable or _runs(widths, table))
            # Among many devices pipelines of unlike numbers do what stages that share a micro-batch do among few.
            alone = beyond or fleet.devices > space.few_devices
            if table is not None and runs and (table.may_stand_alone or not alone):
                own.append(
                    Kind(pool=number, name=pool.name, widths=widths, memory_bytes=float(pool.memory_bytes), table=table)
                )
        found += own if every else undominated(own, first)
    return tuple(found)


def _runs(widths: Widths, table: Table) -> bool:
    """Whether the runtime runs such stages: experts are sharded where the other weights are, and not replicated beside."""
    return not table.expert_width or widths.copies == 1


def _connected(fleet: Fleet, pool: Pool, devices: int) -> bool:
    if devices > pool.devices_per_node and fleet.wire(pool, pool) is None:
        return False
    return devices == 1 or pool.devices_per_node == 1 or pool.inside is not None


def undominated(kinds: Sequence[Kind], layers: Sequence[int]) -> list[Kind]:
    """The kinds without those that another kind of the same pool, devices and copies of all parameters dominates: no worse in any figure of
    any layer (of equal ones the first stays).

    Replacing a dominated kind in any plan makes it no slower and needs no more memory: seconds, bytes and traffic add up and are
    monotonic in each figure.

    Args:
        layers: one of each kind.
    """
    alike: dict[object, list[Kind]] = {}
    for kind in kinds:
        copies = (kind.widths.copies, kind.table.expert_width)
        alike.setdefault((kind.pool, kind.devices, copies), []).append(kind)
    kept = set()
    for group in alike.values():
        figures = [np.array([_figures(kind.table.costs[layer]) for layer in layers]) for kind in group]
        for number, own in enumerate(figures):
            beaten = any(
                np.all(other <= own) and (place < number or np.any(other < own))
                for place, other in enumerate(figures)
                if place != number
            )
            if not beaten:
                kept.add(id(group[number]))
    return [kind for kind in kinds if id(kind) in kept]


def _figures(cost: LayerCost) -> tuple[float, ...]:
    return (*_NO_WORSE(cost), cost.gradient_bytes - cost.expert_bytes)


def usable_widths(widths: Sequence[Widths], devices_per_node: int) -> tuple[Widths, ...]:
    """Widths whose devices divide the node and each other, the largest first: stages of any of them fill nodes exactly.

    A stage may span whole nodes too; its layers are sharded inside each node.
    """
    chosen: list[int] = []
    counts = sorted({own.devices for own in widths}, reverse=True)
    for devices in counts:
        if devices <= devices_per_node and (chosen[-1] if chosen else devices_per_node) % devices == 0:
            chosen.append(devices)
    whole = devices_per_node
    for devices in reversed(counts):
        if devices > devices_per_node and devices % whole == 0:
            chosen.append(devices)
            whole = devices
    return tuple(own for own in widths if own.devices in chosen and own.tensor <= devices_per_node)


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

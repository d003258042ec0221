"""Stage kinds: a number of devices of one pool, and how they divide the work of a stage.

Alike devices are one kind, so the number of stage sequences grows with kinds and not with devices. Dominated kinds are dropped; where
the sequences would still be too many, the fastest and the leanest kinds stay.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations

import numpy as np

from heterodyne.cluster.fleet import Fleet, Pool
from heterodyne.cost.layers import LayerCost, Widths
from heterodyne.search.fleet.plan import TemplateStage
from heterodyne.search.fleet.space import Space
from heterodyne.search.fleet.tables import Table, Tables

__all__ = ["Chosen", "Kind", "chosen_of", "fastest", "kinds_of", "undominated", "usable_widths"]


_ROW_POOLS = 3  # in a sequence of stages at most, since sequences are written out; the template search has any number


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

    def stage(self, start: int, stop: int, *, recompute: bool) -> TemplateStage:
        tensor, context, data = self.widths
        return TemplateStage(
            pool=self.name, width=tensor, context=context, data=data, start=start, stop=stop, recompute=recompute
        )


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
    return (
        cost.forward_s,
        cost.backward_s,
        cost.recompute_s,
        cost.update_s,
        cost.parameter_bytes,
        cost.gradient_bytes,
        cost.optimizer_bytes,
        cost.kept_bytes,
        cost.kept_bytes_recomputed,
        cost.workspace_bytes,
        cost.output_bytes,
        cost.expert_bytes,
        cost.gradient_bytes - cost.expert_bytes,
    )


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


@dataclass(frozen=True, kw_only=True)
class Chosen:
    """Kinds that sequences are built from.

    Args:
        pools: for each kind, the largest number of pools of a sequence that contains it.
        run: the number of stages of one pool in a sequence with other pools.
    """

    kinds: tuple[Kind, ...]
    pools: tuple[int, ...]
    run: int


def chosen_of(kinds: Sequence[Kind], space: Space, per_node: Mapping[str, int]) -> Chosen:
    """So that the work stays about within its limit (`Space.cells`), the fastest and the one that needs least memory of those with as
    many devices of a pool; in rows over three pools and more the last one only, as far as it is in one node.

    Args:
        per_node: devices of a node, by pool.
    """
    layers = len(kinds[0].table.costs)
    most_pools = min(_ROW_POOLS, space.max_pools or _ROW_POOLS)
    most = space.cells / (layers + 1) ** 2
    quick = set(map(id, fastest(kinds)))
    leanest = _best(kinds, lambda kind: kind.table.memory(0, layers, recompute=space.recompute, held=1).total)
    few = [number for number in range(len(kinds)) if id(kinds[number]) in quick or number in leanest]
    every = list(range(len(kinds)))
    own = every if len(kinds) * min(layers, space.max_stages) <= most else few
    pairs = own if _pairs([kinds[n] for n in own]) <= most else few
    triples = pairs
    if most_pools > 2 and _pairs([kinds[n] for n in pairs]) + _triples([kinds[n] for n in pairs]) > most:
        triples = [
            number for number in few if number in leanest and kinds[number].devices <= per_node[kinds[number].name]
        ]
    count_2 = _pairs([kinds[n] for n in pairs])
    count_3 = _triples([kinds[n] for n in triples]) if most_pools > 2 else 0
    run = 1
    while run < space.max_stages and count_2 * (run + 1) ** 2 + count_3 * (run + 1) ** 3 <= most:
        run += 1
    return Chosen(
        kinds=tuple(kinds[n] for n in own),
        pools=tuple(most_pools if n in triples else 2 if n in pairs else 1 for n in own),
        run=run,
    )


def fastest(kinds: Sequence[Kind]) -> list[Kind]:
    """Of each pool and number of devices the fastest for a whole model."""
    if not kinds:
        return []
    layers = len(kinds[0].table.costs)
    kept = _best(kinds, lambda kind: kind.table.forward_s(0, layers) + kind.table.backward_s(0, layers, False))
    return [kind for number, kind in enumerate(kinds) if number in kept]


def _best(kinds: Sequence[Kind], figure: Callable[[Kind], float]) -> set[int]:
    """Of each pool and number of devices, the numbers of those with the least of a figure."""
    found: dict[tuple[int, int], tuple[float, int]] = {}
    for number, kind in enumerate(kinds):
        own = (figure(kind), number)
        found[kind.pool, kind.devices] = min(own, found.get((kind.pool, kind.devices), own))
    return {number for _, number in found.values()}


def _pairs(kinds: Sequence[Kind]) -> int:
    """Rows of two stages in different pools."""
    return sum(a.pool != b.pool for a in kinds for b in kinds)


def _triples(kinds: Sequence[Kind]) -> int:
    count: dict[int, int] = {}
    for kind in kinds:
        count[kind.pool] = count.get(kind.pool, 0) + 1
    return sum(a * b * c for a, b, c in permutations(count.values(), 3))

"""Pipeline templates: sequences of stage kinds, each with the cut whose bottleneck stage is fastest.

`stage_sequences` builds the sequences; those that are whole models become templates here. Alike devices are one kind, so their number
grows with kinds and stages and not with devices.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import ceil

import numpy as np

from heterodyne.cluster.fleet import Fleet
from heterodyne.search.fleet.arrays import Floats, Ints
from heterodyne.search.fleet.bounded_cache import BoundedCache
from heterodyne.search.fleet.cutter import least_cut
from heterodyne.search.fleet.kinds import Chosen, Kind, chosen_of
from heterodyne.search.fleet.plan import Template
from heterodyne.search.fleet.space import Space
from heterodyne.search.fleet.stage_costs import Sharing, StageCosts
from heterodyne.search.fleet.stage_sequences import Grower, Rules

__all__ = ["PipelineTemplates", "shapes"]

_FEW = (2, 4, 16)
_COSTS_KEPT = 128  # arrays of layers by layers, while rows are made one after the other


@dataclass(frozen=True, kw_only=True)
class PipelineTemplates:
    """Templates that fit, for one micro-batch size.

    Args:
        longest_s, total_s: seconds per micro-batch of the bottleneck stage, and of all stages. Shape [rows].
        stages: of each row.
        devices: Shape [rows, pools].
    """

    kinds: tuple[Kind, ...]
    micro_batch: int
    held_at_most: int
    sharing: Sharing
    costs: StageCosts
    longest_s: Floats
    total_s: Floats
    stages: Ints
    devices: Ints
    _node: Ints
    _parent: Ints
    _kind: Ints

    def __len__(self) -> int:
        return len(self.longest_s)

    def templates(self, rows: Iterable[int], *, few: bool = True) -> list[list[Template]]:
        """For each of some rows the cut whose bottleneck is fastest, and those that are best for ``few`` micro-batches."""
        known: BoundedCache[tuple[int, int, int], Floats] = BoundedCache(_COSTS_KEPT)
        found = []
        for row in rows:
            chain = self._chain(row)
            # Every stage has a layer at least, so the first one of a stage is one of so many.
            first = len(self.kinds[0].table.costs) - len(chain) + 1
            costs = [
                known.get((kind, place, len(chain)), partial(self._cost, kind, place, len(chain), first))
                for place, kind in enumerate(chain)
            ]
            counts = [count for count in _FEW if few and count <= self.held_at_most and len(chain) > 1]
            cuts = dict.fromkeys(cut for count in (None, *counts) if (cut := least_cut(costs, count)) is not None)
            found.append([self._template([self.kinds[kind] for kind in chain], points) for points in cuts])
        return found

    def _cost(self, kind: int, place: int, places: int, first: int) -> Floats:
        """Seconds of a stage from each of the layers that it may begin with to each that it may end before."""
        starts, stops = place + np.arange(first)[:, None], place + 1 + np.arange(first)[None, :]
        stages = self.costs.of(np.array(kind), min(places - place, self.held_at_most), starts)
        return np.where(starts < stops, stages.until(np.maximum(stops, starts + 1)), np.inf)

    def _chain(self, row: int) -> list[int]:
        """The kinds of its stages."""
        chain = []
        node = int(self._node[row])
        while node >= 0:
            chain.append(int(self._kind[node]))
            node = int(self._parent[node])
        return chain

    def _template(self, chain: Sequence[Kind], points: Sequence[int]) -> Template:
        stages = []
        for place, kind in enumerate(chain):
            start, stop = points[place], points[place + 1]
            held = min(len(chain) - place, self.held_at_most)
            stages.append(kind.stage(start, stop, recompute=not self.sharing.fits(kind, start, stop, held)))
        return Template(micro_batch=self.micro_batch, stages=tuple(stages))


def shapes(
    fleet: Fleet, kinds: Mapping[int, Sequence[Kind]], *, global_batch: int, sharing: Sharing, space: Space
) -> dict[int, PipelineTemplates]:
    """All templates that fit within the limits of the space, by micro-batch size.

    Args:
        kinds: of stages, by micro-batch size.
    """
    per_node = {pool.name: pool.devices_per_node for pool in fleet.pools}
    chosen = {size: chosen_of(own, space, per_node) for size, own in kinds.items() if own}
    if not chosen:
        return {}
    every = [kind for own in chosen.values() for kind in own.kinds]
    rules = _rules(fleet, chosen, global_batch, space)
    stages = min(len(every[0].table.costs), space.max_stages)
    held = min(stages, int(rules.held.max()))
    costs = StageCosts(every, sharing, held=held, recompute=space.recompute)
    rows = Grower(costs=costs, rules=rules).rows()
    found = {}
    for number, size in enumerate(chosen):
        whole = [np.isfinite(row.reached[:, 0]) & row.alone & (row.size == number) for row in rows]
        if any(own.any() for own in whole):
            found[size] = PipelineTemplates(
                kinds=tuple(every),
                micro_batch=size,
                held_at_most=ceil(global_batch / size),
                sharing=sharing,
                costs=costs,
                longest_s=np.concatenate([row.reached[own, 0] for row, own in zip(rows, whole, strict=True)]),
                total_s=np.concatenate([row.total[own, 0] for row, own in zip(rows, whole, strict=True)]),
                stages=np.repeat(np.arange(1, len(rows) + 1), [int(own.sum()) for own in whole]),
                devices=np.concatenate([row.devices[own] for row, own in zip(rows, whole, strict=True)]),
                _node=np.concatenate([row.node[own] for row, own in zip(rows, whole, strict=True)]),
                _parent=np.concatenate([row.parent for row in rows]),
                _kind=np.concatenate([row.kind for row in rows]),
            )
    return found


def _rules(fleet: Fleet, chosen: Mapping[int, Chosen], global_batch: int, space: Space) -> Rules:
    of = [(number, size, own, kind) for number, (size, own) in enumerate(chosen.items()) for kind in own.kinds]
    kinds = [kind for *_, kind in of]
    return Rules(
        pool=np.array([kind.pool for kind in kinds]),
        devices=np.array([kind.devices for kind in kinds]),
        size=np.array([number for number, *_ in of]),
        pools=np.array([most for own in chosen.values() for most in own.pools]),
        run=np.array([own.run for _, _, own, _ in of]),
        held=np.array([ceil(global_batch / size) for _, size, _, _ in of]),
        alone=np.array([kind.table.may_stand_alone for kind in kinds]),
        room=np.array([pool.devices for pool in fleet.pools]),
        max_stages=space.max_stages,
    )

"""The cost table of each stage of a template, its sums, and what follows from its layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from heterodyne.cluster.fleet import Fleet
from heterodyne.recent import Recent
from heterodyne.search.fleet.arrays import Floats, Ints
from heterodyne.search.fleet.plan import Mix, Template
from heterodyne.search.fleet.tables import CommVolume, Table, Tables

__all__ = ["StageSums", "StageTables"]


class StageSums:
    """Sums of one template. ``tables``: one per stage.

    Attributes:
        starts, stops: layers. Shape [stages]. ``borders``: stage boundaries. Shape [stages + 1].
        own: indices of the first of each set of alike stages.
        alike: for each stage, its index in ``own``. Shape [stages].
        in_row: stages from each one to the end of a run of ranks in one pool. Shape [stages].
    """

    def __init__(self, template: Template, tables: Sequence[Table]) -> None:
        self.template, self.tables = template, tables
        stages = template.stages
        self.starts: Ints = np.array([stage.start for stage in stages], dtype=np.int64)
        self.stops: Ints = np.array([stage.stop for stage in stages], dtype=np.int64)
        self.borders: Ints = np.append(self.starts, self.stops[-1:])
        known: dict[object, int] = {}
        self.own: list[int] = []
        alike: list[int] = []
        for number, (stage, table) in enumerate(zip(stages, tables, strict=True)):
            key = stage.pool, id(table)
            if key not in known:
                known[key] = len(known)
                self.own.append(number)
            alike.append(known[key])
        self.alike: Ints = np.array(alike)
        in_row = [1] * len(stages)
        for number in range(len(stages) - 2, -1, -1):
            if stages[number].pool == stages[number + 1].pool and (number + 1) % template.places:
                in_row[number] = in_row[number + 1] + 1
        self.in_row: Ints = np.array(in_row, dtype=np.int64)

    @cached_property
    def sent(self) -> CommVolume:
        whole, kept = np.empty((3, 3, len(self.starts))), np.empty((3, 3, len(self.starts)))
        for table, at in self._spans:
            whole[..., at], kept[..., at] = table.sent(self.starts[at], self.stops[at])
        return CommVolume(whole, kept)

    @cached_property
    def backward_s(self) -> Floats:
        """Of a micro-batch, with the forward again where that is recomputed. Shape [stages]."""
        return np.array(
            [
                table.backward_s(stage.start, stage.stop, stage.recompute)
                for stage, table in zip(self.template.stages, self.tables, strict=True)
            ]
        )

    def update_s(self, replicas: int, zero: int) -> Floats:
        """Seconds of the optimizer update per pipeline rank: of all its parameters, or from ZeRO level 1 on of its shard."""
        whole, shared = self._updates_s
        own = whole if zero < 1 else shared / replicas
        found: Floats = own.reshape(self.template.chunks, -1).sum(axis=0)
        return found

    @cached_property
    def _updates_s(self) -> Floats:
        found = np.empty((2, len(self.starts)))
        for table, at in self._spans:
            found[:, at] = table.updates_s(self.starts[at], self.stops[at])
        return found

    @property
    def _spans(self) -> list[tuple[Table, Ints]]:
        """Tables, each with its stages."""
        return [(self.tables[first], np.flatnonzero(self.alike == number)) for number, first in enumerate(self.own)]


@dataclass(frozen=True, kw_only=True)
class StageTables:
    """Cost tables of templates over one fleet."""

    fleet: Fleet
    tables: Tables
    _known: dict[Template, tuple[Table, ...]] = field(default_factory=dict, repr=False)
    _tied: dict[Template, tuple[tuple[int, ...], float]] = field(default_factory=dict, repr=False)
    _sums: Recent[Template, StageSums] = field(default_factory=lambda: Recent(1024), repr=False)

    def of(self, template: Template) -> tuple[Table, ...]:
        """Raises KeyError if the costs of a stage are not known."""
        if template not in self._known:
            found = []
            for stage in template.stages:
                table = self.tables.table(self.fleet.pool(stage.pool).kind, stage.widths, template.micro_batch)
                if table is None:
                    raise KeyError(f"{stage.pool}: {stage.widths}, micro-batch {template.micro_batch}")
                found.append(table)
            self._known[template] = tuple(found)
        return self._known[template]

    def sums(self, template: Template) -> StageSums:
        """Raises KeyError if the costs of a stage are not known."""
        return self._sums.get(template, lambda: StageSums(template, self.of(template)))

    def tied(self, template: Template) -> tuple[tuple[int, ...], float]:
        """Ranks that hold tied parameters, and the bytes of their gradients on one of them."""
        if template not in self._tied:
            self._tied[template] = self._found_tied(template)
        return self._tied[template]

    def _found_tied(self, template: Template) -> tuple[tuple[int, ...], float]:
        held: dict[int, float] = {}
        for number, (stage, table) in enumerate(zip(template.stages, self.of(template), strict=True)):
            own = table.tied_bytes(stage.start, stage.stop)
            if own:
                place = number % template.places
                held[place] = max(own, held.get(place, 0.0))
        return tuple(held), max(held.values(), default=0.0)

    def expert_width(self, template: Template, number: int) -> int:
        """Devices of a stage over which one set of its experts is sharded; 0 where it has none."""
        stage, table = template.stages[number], self.of(template)[number]
        routed = any(cost.expert_bytes for cost in table.costs[stage.start : stage.stop])
        return table.expert_width if routed else 0

    def recomputed(self, template: Template, number: int) -> tuple[int, ...]:
        """Layers of a stage that are recomputed."""
        stage, costs = template.stages[number], self.of(template)[number].costs
        return tuple(
            layer for layer in range(stage.start, stage.stop) if stage.recompute and costs[layer].recompute_s > 0
        )

    def cut_alike(self, mix: Mix) -> bool:
        """Whether every layer, and every tied parameter, is sharded over as many devices in all of these pipelines: this library shards
        state over devices that hold the same boxes of a weight alone (`plan.check_state`)."""
        by_layer: dict[int, tuple[int, int]] = {}
        for template, _ in mix:
            tied, _ = self.tied(template)
            if len({template.homes[place].widths.tensor for place in tied}) > 1:
                return False
            for number, stage in enumerate(template.stages):
                cut = stage.widths.tensor, self.expert_width(template, number)
                if any(by_layer.setdefault(layer, cut) != cut for layer in range(stage.start, stage.stop)):
                    return False
        return True

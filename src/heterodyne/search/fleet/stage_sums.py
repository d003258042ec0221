"""Per-stage sums of one pipeline: what its stages send, update and compute, independent of other pipelines."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np

from heterodyne.search.fleet.arrays import Floats, Ints
from heterodyne.search.fleet.comm_volume import CommVolume
from heterodyne.search.fleet.plan import Template
from heterodyne.search.fleet.tables import Table

__all__ = ["StageSums"]


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

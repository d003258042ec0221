"""The cost table of each stage of a template, and its sums."""

from __future__ import annotations

from dataclasses import dataclass, field

from heterodyne.cluster.fleet import Fleet
from heterodyne.search.fleet.bounded_cache import BoundedCache
from heterodyne.search.fleet.plan import Template
from heterodyne.search.fleet.stage_sums import StageSums
from heterodyne.search.fleet.tables import Table, Tables

__all__ = ["StageTables"]

_SUMS_KEPT = 1024


@dataclass(frozen=True, kw_only=True)
class StageTables:
    """Cost tables of templates over one fleet."""

    fleet: Fleet
    tables: Tables
    _known: dict[Template, tuple[Table, ...]] = field(default_factory=dict, repr=False)
    _sums: BoundedCache[Template, StageSums] = field(default_factory=lambda: BoundedCache(_SUMS_KEPT), repr=False)

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
        held: dict[int, float] = {}
        for number, (stage, table) in enumerate(zip(template.stages, self.of(template), strict=True)):
            own = table.tied_bytes(stage.start, stage.stop)
            if own:
                place = number % template.places
                held[place] = max(own, held.get(place, 0.0))
        return tuple(held), max(held.values(), default=0.0)

"""The cost table of each stage of a template, its sums, and what follows from its layers."""

from __future__ import annotations

from dataclasses import dataclass, field

from heterodyne.cluster.fleet import Fleet
from heterodyne.search.fleet.bounded_cache import BoundedCache
from heterodyne.search.fleet.evaluated_plan import Mix
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
    _tied: dict[Template, tuple[tuple[int, ...], float]] = field(default_factory=dict, repr=False)
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
            if len({template.homes[place].width for place in tied}) > 1:
                return False
            for number, stage in enumerate(template.stages):
                cut = stage.width, self.expert_width(template, number)
                if any(by_layer.setdefault(layer, cut) != cut for layer in range(stage.start, stage.stop)):
                    return False
        return True

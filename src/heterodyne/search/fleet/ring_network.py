"""A network model of rings over the wires of a fleet.

A message takes alpha + beta B (Hockney, 1994). The n devices that hold the same layer form a ring in which every byte enters a node
once: one pass sends (n - 1) / n bytes per byte of the layer over every link (Patarasuk and Yuan, 2009), as in `predictor.network`. One
pass is a reduce-scatter or an all-gather, two are an all-reduce, along a tree where latency is lower. A ring runs at the pace of its
slowest link. All layers of a node share its one link.

A stage has copies of its parameters too, where its devices divide the sequence or the micro-batch, and of its experts, where it has more
devices than one set is sharded over: they are members of the same rings.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from math import inf

from heterodyne.cluster.fleet import Fleet, Pool
from heterodyne.cost.layers import Widths
from heterodyne.predictor.software import Software
from heterodyne.recent import Recent
from heterodyne.search.fleet.fleet_wires import Wires
from heterodyne.search.fleet.gradient_sync import Exchanges, GradientSync, Line, Placed, RingCost
from heterodyne.search.fleet.plan import Layout, Template, TemplateStage
from heterodyne.search.fleet.stage_tables import StageSums
from heterodyne.search.fleet.tables import Rates

__all__ = ["RingNetwork"]


@dataclass(frozen=True)
class RingNetwork:
    """Seconds and usd of the traffic between devices of a fleet, as some software sends it."""

    fleet: Fleet
    software: Software = field(default_factory=Software)

    @cached_property
    def _wires(self) -> Wires:
        return Wires(self.fleet)

    @cached_property
    def _known(self) -> dict[object, RingCost]:
        return {}

    @cached_property
    def _lines(self) -> Recent[tuple[StageSums, int, Layout], Line]:
        return Recent(1024)

    @cached_property
    def _until(self) -> Recent[Template, list[int]]:
        return Recent(1024)

    def send_s(self, template: Template, stage: int, size_bytes: float, layout: Layout) -> float:
        """Return the seconds of a message from a stage to the next one: over the link inside a node, or over the share of the node's link
        that each of its pipelines has.
        """
        source, target = template.stages[stage], template.stages[stage + 1]
        pool = self.fleet.pool(source.pool)
        if source.pool == target.pool and self._same_node(template, stage, pool, layout):
            inside = self._wires.inside(pool)
            # Each device sends its part of it, beside the others.
            own = size_bytes / min(source.devices, target.devices)
            return inf if inside is None else inside.latency_s + own / inside.bandwidth_bytes_per_s
        wire = self._wires.between(source.pool, target.pool)
        if wire is None:
            return inf
        part = min(self._part(template, source, layout), self._part(template, target, layout))
        return wire.latency_s + size_bytes / (wire.bandwidth_bytes_per_s * part)

    def summed_s(self, template: Template, places: Sequence[int], size_bytes: float, layout: Layout) -> float:
        """Return the seconds of an all-reduce between some ranks of each pipeline: a ring, two passes, at the pace of its slowest link."""
        homes = [template.homes[place] for place in places]
        ways = [self._way(template, a, b, layout) for a, b in pairwise([*homes, homes[0]])]
        steps = 2 * (len(homes) - 1)
        return steps * max(latency_s + size_bytes / len(homes) * s_per_byte for latency_s, s_per_byte in ways)

    def exchanges(self, placed: Placed, sums_of: Mapping[Template, StageSums], layout: Layout) -> Exchanges:
        """Return the collectives of gradients and parameters over the replicas of their layers."""
        lines = [self._line(sums_of[template], count, layout) for template, count in placed]
        laid = GradientSync(self._wires, lines, self._known, self.software)
        of = {template: own for (template, _), own in zip(placed, laid.exchanges(), strict=True)}
        if not self.fleet.usd_per_byte:
            return Exchanges(of=of)
        gradients, updated, parameters = laid.usd()
        return Exchanges(of=of, gradients_usd=gradients, updated_usd=updated, parameters_usd=parameters)

    def least_s_per_byte(self, pool: str, widths: Widths, replicas: int) -> Rates:
        """Return lower bounds on the seconds per byte of a ring pass of a stage on a pool with at least ``replicas`` replicas: per byte of
        a device if all are in one node, and per byte of the stage if not. Infinite where impossible.
        """
        own = self.fleet.pool(pool)
        inside = self._wires.inside(own)
        wires = [wire for other in self.fleet.pools if (wire := self._wires.between(pool, other.name)) is not None]
        together = replicas * widths.devices <= own.devices_per_node
        return (
            1 / inside.bandwidth_bytes_per_s if together and inside is not None else inf,
            1 / max(wire.bandwidth_bytes_per_s for wire in wires) if wires else inf,
        )

    def _way(
        self, template: Template, source: TemplateStage, target: TemplateStage, layout: Layout
    ) -> tuple[float, float]:
        """Latency and seconds per byte between any two ranks of a pipeline."""
        pool = self.fleet.pool(source.pool)
        if source.pool == target.pool and self._all_in_a_node(template, pool, layout):
            wire, part = self._wires.inside(pool), float(min(source.widths.tensor, target.widths.tensor))
        else:
            wire = self._wires.between(source.pool, target.pool)
            part = min(self._part(template, source, layout), self._part(template, target, layout))
        return (inf, inf) if wire is None else (wire.latency_s, 1 / (wire.bandwidth_bytes_per_s * part))

    def _line(self, sums: StageSums, count: int, layout: Layout) -> Line:
        return self._lines.get((sums, count, layout), lambda: Line(self._wires, sums, count, layout))

    def _same_node(self, template: Template, stage: int, pool: Pool, layout: Layout) -> bool:
        if pool.nodes == 1:
            return True
        if layout == "stages":
            return False
        own = template.devices[pool.name]
        before = self._until.get(template, lambda: _until(template))[stage % template.places]
        if own <= pool.devices_per_node:
            return pool.devices_per_node % own == 0
        return own % pool.devices_per_node == 0 and before % pool.devices_per_node != 0

    def _all_in_a_node(self, template: Template, pool: Pool, layout: Layout) -> bool:
        """Whether all ranks of a pipeline in a pool are in one node."""
        own = template.devices[pool.name]
        return pool.nodes == 1 or (layout == "pipelines" and pool.devices_per_node % own == 0)

    def _part(self, template: Template, stage: TemplateStage, layout: Layout) -> float:
        """The share of a node's link."""
        pool = self.fleet.pool(stage.pool)
        own = stage.devices if layout == "stages" else template.devices[stage.pool]
        # A stage that is wider than a node sends from all of its nodes.
        return max(min(1.0, own / pool.devices_per_node), stage.devices / pool.devices_per_node)


def _until(template: Template) -> list[int]:
    """Of each place, the devices of its pool up to it, its own with them."""
    count: dict[str, int] = {}
    found = []
    for home in template.homes:
        count[home.pool] = count.get(home.pool, 0) + home.devices
        found.append(count[home.pool])
    return found

"""Devices, money, energy and memory of a step."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from heterodyne.cluster.fleet import Fleet
from heterodyne.search.fleet.pipeline_memory import PipelineMemory
from heterodyne.search.fleet.plan import Predicted, Template, TemplatePlan
from heterodyne.search.fleet.stage_tables import StageTables

__all__ = ["ResourceUse"]


@dataclass(frozen=True, kw_only=True)
class ResourceUse:
    """Resource use of plans on one fleet."""

    fleet: Fleet
    room: PipelineMemory
    tables: StageTables

    def of(self, plan: TemplatePlan, seconds: tuple[float, float, float], sync_usd: float, replicas: int) -> Predicted:
        step_s = sum(seconds)
        used = [(self.fleet.pool(name), count) for name, count in plan.devices.items()]
        prices = [pool.usd_per_device_hour for pool, _ in used]
        watts = [pool.watts_per_device for pool, _ in used]
        hourly = sum((p or 0.0) * n for p, (_, n) in zip(prices, used, strict=True)) if None not in prices else None
        power = sum((w or 0.0) * n for w, (_, n) in zip(watts, used, strict=True)) if None not in watts else None
        peaks = [
            (need.total, self.fleet.pool(home.pool).memory_bytes)
            for g in plan.groups
            for need, home in zip(
                self.room.memory(
                    g.template,
                    micro_batches=g.num_microbatches,
                    schedule=plan.schedule,
                    replicas=replicas,
                    zero=plan.zero,
                ),
                g.template.homes,
                strict=True,
            )
        ]
        fullest, room = max(peaks, key=lambda own: own[0] / own[1])
        return Predicted(
            step_s=step_s,
            pipelines_s=seconds[0],
            sync_s=seconds[1],
            update_s=seconds[2],
            samples_per_s=plan.global_batch / step_s if step_s > 0 else inf,
            devices=sum(count for _, count in used),
            usd_per_hour=hourly,
            usd=None if hourly is None else hourly * step_s / 3600 + sync_usd + self._message_usd(plan),
            joules=None if power is None else power * step_s,
            peak_bytes=max(peak for peak, _ in peaks),
            fullest_bytes=fullest,
            peak_share=fullest / room,
        )

    def _message_usd(self, plan: TemplatePlan) -> float:
        """Price of the messages between stages."""
        if not self.fleet.usd_per_byte:
            return 0.0
        usd = 0.0
        for group in plan.groups:
            tables = self.tables.of(group.template)
            for a, b, table in zip(group.template.stages, group.template.stages[1:], tables, strict=False):
                price = self.fleet.traffic_usd_per_byte(self.fleet.pool(a.pool), self.fleet.pool(b.pool))
                if a.pool != b.pool and price:
                    usd += 2 * price * table.output_bytes(a.stop) * group.num_microbatches * group.replicas
            usd += group.replicas * self._tied_usd(group.template)
        return usd

    def _tied_usd(self, template: Template) -> float:
        """Price of the all-reduce of tied parameters between ranks."""
        places, size_bytes = self.tables.tied(template)
        if len(places) < 2:
            return 0.0
        pools = [self.fleet.pool(template.homes[place].pool) for place in places]
        around = zip(pools, [*pools[1:], pools[0]], strict=True)
        price = sum(self.fleet.traffic_usd_per_byte(a, b) for a, b in around if a.name != b.name)
        return price * size_bytes * 2 * (len(places) - 1) / len(places)

"""Prediction of a fleet plan: the step time, played exactly, with its money, energy and memory.

A step is the longest pipeline, the exposed sync of gradients and parameters, and the update. Pipelines are played with their unequal
stages and the messages between them; the micro-batches of each follow: as many as it can do until all are done.

From ZeRO level 1 on the lowest level that fits is the fastest: each level communicates all that the one below does and more. Level 0
updates everything everywhere but gathers nothing, so of 0 and 1 either can be faster.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import inf

from heterodyne.cluster.fleet import Fleet
from heterodyne.plan.schedules.makespans import Makespans
from heterodyne.predictor.software import Software
from heterodyne.recent import Recent
from heterodyne.search.fleet.gradient_sync import Exchange, Exchanges
from heterodyne.search.fleet.pipeline_memory import PipelineMemory
from heterodyne.search.fleet.pipeline_time import PipelineTime
from heterodyne.search.fleet.plan import (
    ZERO_LEVELS,
    Candidate,
    Layout,
    Mix,
    Predicted,
    ScheduleName,
    Template,
    TemplateGroup,
    TemplatePlan,
)
from heterodyne.search.fleet.ring_network import RingNetwork
from heterodyne.search.fleet.shares import groups_of, micro_batches_each, time_until
from heterodyne.search.fleet.stage_tables import StageTables
from heterodyne.search.fleet.tables import Tables
from heterodyne.search.fleet.zero_traffic import beside, exposed_at_end_s, of_places, usd

__all__ = ["Predictor"]

_SLACK = 1e-12


@dataclass(frozen=True, kw_only=True)
class Predictor:
    """Predicts plans of one model on one fleet for one global batch, with caches.

    Args:
        software: that runs the plans.
    """

    fleet: Fleet
    tables: Tables
    global_batch: int
    software: Software = field(default_factory=Software)
    _after: Recent[tuple[Mix, Layout, int], tuple[float, float]] = field(
        default_factory=lambda: Recent(1024), repr=False
    )
    _exchanged: Recent[tuple[Mix, Layout], Exchanges] = field(default_factory=lambda: Recent(64), repr=False)

    @cached_property
    def network(self) -> RingNetwork:
        """The model of traffic between devices."""
        return RingNetwork(self.fleet, self.software)

    @cached_property
    def pipeline_time(self) -> PipelineTime:
        """Times of single pipelines."""
        overlap, duplex = self.software.overlap_sends, self.software.duplex
        return PipelineTime(tables=self.stage_tables, network=self.network, overlap_sends=overlap, duplex=duplex)

    @cached_property
    def pipeline_memory(self) -> PipelineMemory:
        """Memory of single pipelines."""
        return PipelineMemory(
            fleet=self.fleet, global_batch=self.global_batch, tables=self.stage_tables, software=self.software
        )

    @cached_property
    def stage_tables(self) -> StageTables:
        """What each stage costs, with all that follows from its layers alone."""
        return StageTables(fleet=self.fleet, tables=self.tables)

    def played(self, mix: Mix, schedule: ScheduleName, layout: Layout, zero: int) -> Mapping[Template, Makespans]:
        """Makespans of each template, with the ZeRO traffic of each micro-batch."""
        plain = {template: self.pipeline_time.makespans(template, schedule, layout) for template, _ in mix}
        if zero < 2:
            return plain
        exchanges = self.exchanges(mix, layout).of
        found = {}
        for template, own in plain.items():
            stages = beside(own.stages, exchanges[template], zero, self.software)
            same = stages == list(own.stages)
            found[template] = (
                own
                if same
                else Makespans(stages, own.sends, schedule, template.chunks, own.busy, self.pipeline_time.played)
            )
        return found

    def exchanges(self, mix: Mix, layout: Layout) -> Exchanges:
        """Between the replicas of all layers."""

        def made() -> Exchanges:
            return self.network.exchanges(
                mix, {template: self.stage_tables.sums(template) for template, _ in mix}, layout
            )

        return self._exchanged.get((mix, layout), made)

    def sync_and_update_s(self, mix: Mix, layout: Layout, zero: int) -> tuple[float, float]:
        """Seconds of a step after its pipelines: exposed sync of gradients and parameters, and the optimizer update. Independent of the
        schedule.
        """
        return self._after.get((mix, layout, zero), lambda: self._sync_and_update_s(mix, layout, zero))

    def _sync_and_update_s(self, mix: Mix, layout: Layout, zero: int) -> tuple[float, float]:
        whole = sum(count for _, count in mix)
        replicas = self._sharding(whole, zero)
        exchanges = self.exchanges(mix, layout).of if replicas == whole else self._in_groups(mix, layout, replicas)
        sync_s = max(
            exposed_at_end_s(of_places(own, template.places), zero, self.software)
            for template, own in exchanges.items()
        )
        # The gradient of an embedding is made last, so nothing hides its sum with that of the head.
        sync_s += max(self._tied_s(template, layout) for template, _ in mix)
        update_s = max(float(self.stage_tables.sums(template).update_s(replicas, zero).max()) for template, _ in mix)
        return sync_s, update_s

    def _in_groups(self, mix: Mix, layout: Layout, group: int) -> dict[Template, Exchange]:
        """Where neighbours share state: gradients are summed over all replicas, updated parameters come from one of ``group``."""
        few = self.exchanges(tuple((template, min(count, group)) for template, count in mix), layout).of
        return {
            template: replace(own, scattered_s=own.reduced_s, updated_s=few[template].updated_s)
            for template, own in self.exchanges(mix, layout).of.items()
        }

    def _tied_s(self, template: Template, layout: Layout) -> float:
        """All-reduce of tied parameters between ranks of one pipeline, after the sync over replicas (as in Megatron-LM)."""
        places, size_bytes = self.stage_tables.tied(template)
        return self.network.summed_s(template, places, size_bytes, layout) if len(places) > 1 else 0.0

    def evaluate(
        self,
        mix: Mix,
        *,
        schedule: ScheduleName = "1F1B",
        layout: Layout = "stages",
        zero: Sequence[int] = ZERO_LEVELS,
        below_s: float = inf,
    ) -> Candidate | None:
        """The best division of the batch over these pipelines at the best ZeRO level, with its prediction; None if they do not fit, or one
        would have no samples.

        A plan is not played to its end once its step is seen to be no shorter than ``below_s``.
        """
        if not mix or not self._enough_devices(mix):
            return None
        best: Candidate | None = None
        for level, most in self._in_turn(mix, schedule, layout, zero):
            found, free = self._at_level(mix, schedule, layout, level, most, below_s)
            if found is not None and found.predicted.step_s < below_s:
                best, below_s = found, found.predicted.step_s
            if free:
                break
        return best

    def _in_turn(
        self, mix: Mix, schedule: ScheduleName, layout: Layout, zero: Sequence[int]
    ) -> Iterator[tuple[int, list[int]]]:
        """ZeRO levels that fit with the largest number of micro-batches of each template, up to the first that no memory limits."""
        if not _shared(mix):
            zero = (0,)
        first = [(level, most) for level in zero if level < 2 and (most := self._room(mix, schedule, level))]
        if len(first) > 1:
            first.sort(key=lambda entry: (sum(self.sync_and_update_s(mix, layout, entry[0])), entry[0]))
        yield from first
        if self.software.keeps_gathered and any(template.places > 1 for template, _ in mix):
            return  # in pipelines such software shards no more than level 1 does
        for level in sorted(zero):
            if level > 1 and (most := self._room(mix, schedule, level)):
                yield level, most

    def _sharding(self, replicas: int, zero: int) -> int:
        """Of so many replicas of a pipeline, those that share state."""
        group = self.software.state_group
        return min(replicas, group) if zero == 1 and group else replicas

    def _room(self, mix: Mix, schedule: ScheduleName, zero: int) -> list[int]:
        """The largest number of micro-batches of a pipeline of each template; empty if one has no memory for any."""
        replicas = self._sharding(sum(count for _, count in mix), zero)
        found = []
        for template, _ in mix:
            most = self.pipeline_memory.most_micro_batches(template, schedule, replicas, zero)
            if most < 1:
                return []
            found.append(most)
        return found

    def _at_level(
        self,
        mix: Mix,
        schedule: ScheduleName,
        layout: Layout,
        zero: int,
        most: Sequence[int],
        below_s: float,
    ) -> tuple[Candidate | None, bool]:
        """The plan at one ZeRO level, and whether memory limits no pipeline: then no higher level can be faster."""
        replicas = self._sharding(sum(count for _, count in mix), zero)
        free = all(own == self.pipeline_memory.whole(template) for own, (template, _) in zip(most, mix, strict=True))
        sync_s, update_s = self.sync_and_update_s(mix, layout, zero)
        if sync_s == inf:
            return None, True
        by_template = self.played(mix, schedule, layout, zero)
        played = [by_template[template] for template, _ in mix]

        def fits(number: int, count: int) -> bool:
            return mix[number][0].chunks == 1 or self.pipeline_memory.fits(
                mix[number][0], count, schedule, replicas, zero
            )

        counts = micro_batches_each(mix, self.global_batch, played, most, below_s - sync_s - update_s, fits)
        if counts is None:
            return None, free
        groups = groups_of(mix, self.global_batch, counts)
        several = [g for g in groups if g.template.chunks > 1]
        if not all(
            self.pipeline_memory.fits(g.template, g.num_microbatches, schedule, replicas, zero) for g in several
        ):
            return None, free
        pipelines_s = max(by_template[g.template].seconds(g.num_microbatches) for g in groups)
        step_s = self._step_s(mix, groups, schedule, layout, zero)
        plan = TemplatePlan(
            groups=groups,
            global_batch=self.global_batch,
            schedule=schedule,
            layout=layout,
            zero=zero,
        )
        shown_s = sync_s if zero < 2 else max(sync_s, step_s - pipelines_s - update_s)
        seconds = (pipelines_s, shown_s, update_s)
        free = free or all(count < own for count, own in zip(counts, most, strict=True))
        return Candidate(plan=plan, predicted=self._predicted(plan, seconds, replicas)), free

    def _predicted(self, plan: TemplatePlan, seconds: tuple[float, float, float], replicas: int) -> Predicted:
        """Devices, money, energy and memory of a step. ``seconds``: of pipelines, of sync and of the update."""
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
                self.pipeline_memory.memory(
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
            usd=None if hourly is None else hourly * step_s / 3600 + self.traffic_usd(plan),
            joules=None if power is None else power * step_s,
            peak_bytes=max(peak for peak, _ in peaks),
            fullest_bytes=fullest,
            peak_share=fullest / room,
        )

    def traffic_usd(self, plan: TemplatePlan) -> float:
        """Return the price of what is sent in a step: messages between stages, gradients and parameters."""
        if not self.fleet.usd_per_byte:
            return 0.0
        most = max(group.num_microbatches for group in plan.groups)
        return usd(self.exchanges(plan.mix, plan.layout), plan.zero, most) + self._message_usd(plan)

    def _message_usd(self, plan: TemplatePlan) -> float:
        usd = 0.0
        for group in plan.groups:
            tables = self.stage_tables.of(group.template)
            for a, b, table in zip(group.template.stages, group.template.stages[1:], tables, strict=False):
                price = self.fleet.traffic_usd_per_byte(self.fleet.pool(a.pool), self.fleet.pool(b.pool))
                if a.pool != b.pool and price:
                    usd += 2 * price * table.output_bytes(a.stop) * group.num_microbatches * group.replicas
            usd += group.replicas * self._tied_usd(group.template)
        return usd

    def _tied_usd(self, template: Template) -> float:
        """Price of the all-reduce of tied parameters between ranks."""
        places, size_bytes = self.stage_tables.tied(template)
        if len(places) < 2:
            return 0.0
        pools = [self.fleet.pool(template.homes[place].pool) for place in places]
        around = zip(pools, [*pools[1:], pools[0]], strict=True)
        price = sum(self.fleet.traffic_usd_per_byte(a, b) for a, b in around if a.name != b.name)
        return price * size_bytes * 2 * (len(places) - 1) / len(places)

    def _step_s(
        self, mix: Mix, groups: Sequence[TemplateGroup], schedule: ScheduleName, layout: Layout, zero: int
    ) -> float:
        """Seconds of a step. From level 2 on never less than at the level below, whose collectives it contains."""
        played = self.played(mix, schedule, layout, zero)
        pipelines_s = max(played[g.template].seconds(g.num_microbatches) for g in groups)
        own = pipelines_s + sum(self.sync_and_update_s(mix, layout, zero))
        return own if zero < 2 else max(own, self._step_s(mix, groups, schedule, layout, zero - 1))

    def bound_s(self, mix: Mix, *, split: bool = True) -> float:
        """Lower bound on `evaluate` for these pipelines: messages of the better layout, and no sync.

        ``split``: also under schedules that split the backward.
        """
        lines = [(self.pipeline_time.lines(template, split), count * template.micro_batch) for template, count in mix]
        if not all(own for own, _ in lines):
            return inf
        return time_until(lines, [self.global_batch] * len(lines), self.global_batch)

    def least_sync_and_update_s(self, mix: Mix, layouts: Sequence[Layout], zero: Sequence[int]) -> float:
        """Lower bound on `sync_and_update_s` over some layouts and levels; infinite if the mix is impossible.

        From level 2 on it contains all of level 1 (see `_step_s`).
        """
        if not self._enough_devices(mix):
            return inf
        levels = sorted({min(level, 1) for level in zero}) if _shared(mix) else [0]
        return min(sum(self.sync_and_update_s(mix, layout, level)) for layout in layouts for level in levels)

    def bound_at_most(self, mix: Mix, seconds: float, *, split: bool = True) -> bool:
        """Whether `bound_s` is at most so many seconds."""
        if seconds <= 0:
            return False
        done = 0.0
        for template, count in mix:
            lines = self.pipeline_time.lines(template, split)
            if not lines:
                return False
            rounds = min(int((seconds - a) / e * (1 + _SLACK)) for a, e in lines if e > 0)
            done += count * template.micro_batch * max(0, rounds)
        return done >= self.global_batch

    def _enough_devices(self, mix: Mix) -> bool:
        used: dict[str, int] = {}
        for template, count in mix:
            for pool, devices in template.devices.items():
                used[pool] = used.get(pool, 0) + count * devices
        return all(devices <= self.fleet.pool(pool).devices for pool, devices in used.items())


def _shared(mix: Mix) -> bool:
    """Whether some parameter is on more than one device."""
    return sum(count for _, count in mix) > 1 or any(
        s.widths.copies > 1 for template, _ in mix for s in template.stages
    )

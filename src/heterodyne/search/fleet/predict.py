"""What a plan over a fleet takes: a step's seconds, played exactly (`spent`: money, energy and memory).

A step is the longest pipeline, what shows of the exchange of gradients and parameters, the update. Pipelines are played with their
unequal stages and the messages between them; how many micro-batches each gets follows from that: as many as it can do until all are done.

Of the levels of state sharding the least that fits is the fastest from 1 on: every level exchanges all that the one below it does and
more. Level 0 updates everything everywhere but gathers nothing, so of 0 and 1 either can be the faster one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import inf

from heterodyne.cluster.fleet import Fleet
from heterodyne.plan.schedules.makespans import Makespans
from heterodyne.search.fleet.alone import Alone
from heterodyne.search.fleet.kept import Kept
from heterodyne.search.fleet.network import Exchanges, Network
from heterodyne.search.fleet.plan import (
    ZERO_LEVELS,
    Layout,
    ScheduleName,
    Template,
    TemplateGroup,
    TemplatePlan,
)
from heterodyne.search.fleet.room import Room
from heterodyne.search.fleet.sharding import at_end_s, beside, of_places, usd
from heterodyne.search.fleet.shares import groups_of, micro_batches_each, time_until
from heterodyne.search.fleet.spent import Spent
from heterodyne.search.fleet.stage_sums import StageSums
from heterodyne.search.fleet.stage_tables import StageTables
from heterodyne.search.fleet.tables import Table, Tables
from heterodyne.search.fleet.weighed import Mix, Weighed

__all__ = ["Predictor"]

_SLACK = 1e-12


@dataclass(frozen=True, kw_only=True)
class Predictor:
    """Predicts plans of one model on one fleet for one global batch. What was computed once is kept.

    Args:
        blocking: whether a device waits until the next stage has what it sends, and computes nothing meanwhile.
        overlap: whether gradients are exchanged while the last backward goes on.
    """

    fleet: Fleet
    tables: Tables
    network: Network
    global_batch: int
    blocking: bool = False
    overlap: bool = True
    _after: Kept[tuple[Mix, Layout, int], tuple[float, float]] = field(default_factory=lambda: Kept(1024), repr=False)
    _exchanged: Kept[tuple[Mix, Layout], Exchanges] = field(default_factory=lambda: Kept(64), repr=False)

    @cached_property
    def alone(self) -> Alone:
        """What each pipeline takes by itself."""
        return Alone(tables=self._stage_tables, network=self.network, blocking=self.blocking)

    @cached_property
    def room(self) -> Room:
        """In the memory of the devices."""
        return Room(fleet=self.fleet, global_batch=self.global_batch, tables=self._stage_tables)

    @cached_property
    def _spent(self) -> Spent:
        return Spent(fleet=self.fleet, room=self.room, tables=self._stage_tables)

    @cached_property
    def _stage_tables(self) -> StageTables:
        return StageTables(fleet=self.fleet, tables=self.tables)

    def stage_tables(self, template: Template) -> tuple[Table, ...]:
        """Raises KeyError if the costs of a stage are not known."""
        return self._stage_tables.of(template)

    def stage_sums(self, template: Template) -> StageSums:
        """Raises KeyError if the costs of a stage are not known."""
        return self._stage_tables.sums(template)

    def expert_width(self, template: Template, number: int) -> int:
        """Devices of a stage over which one set of its experts lies; 0 where it has none."""
        stage, table = template.stages[number], self.stage_tables(template)[number]
        routed = any(cost.expert_bytes for cost in table.costs[stage.start : stage.stop])
        return table.expert_width if routed else 0

    def played(self, mix: Mix, schedule: ScheduleName, layout: Layout, zero: int) -> Mapping[Template, Makespans]:
        """Of each template, with what is exchanged beside each of its micro-batches."""
        plain = {template: self.alone.makespans(template, schedule, layout) for template, _ in mix}
        if zero < 2:
            return plain
        exchanges = self.exchanges(mix, layout).of
        found = {}
        for template, own in plain.items():
            stages = beside(own.stages, exchanges[template], zero, overlap=self.overlap)
            same = stages == list(own.stages)
            found[template] = (
                own if same else Makespans(stages, own.sends, schedule, template.chunks, self.alone.played)
            )
        return found

    def exchanges(self, mix: Mix, layout: Layout) -> Exchanges:
        """Between the replicas of all layers."""

        def made() -> Exchanges:
            return self.network.exchanges(mix, {template: self.stage_sums(template) for template, _ in mix}, layout)

        return self._exchanged.get((mix, layout), made)

    def after_s(self, mix: Mix, layout: Layout, zero: int) -> tuple[float, float]:
        """What a step takes after its pipelines: what shows of gradients and parameters, and the update. The same under every schedule."""
        return self._after.get((mix, layout, zero), lambda: self._after_s(mix, layout, zero))

    def _after_s(self, mix: Mix, layout: Layout, zero: int) -> tuple[float, float]:
        exchanges = self.exchanges(mix, layout).of
        replicas = sum(count for _, count in mix)
        sync_s = max(
            at_end_s(of_places(own, template.places), zero, overlap=self.overlap) for template, own in exchanges.items()
        )
        # The gradient of an embedding is made last, so nothing hides its sum with that of the head.
        sync_s += max(self._tied_s(template, layout) for template, _ in mix)
        update_s = max(float(self.stage_sums(template).update_s(replicas, zero).max()) for template, _ in mix)
        return sync_s, update_s

    def _tied_s(self, template: Template, layout: Layout) -> float:
        """Of the sum over places of one pipeline that hold the same parameters, after the sums over replicas (as Megatron-LM does it)."""
        places, size_bytes = self._stage_tables.tied(template)
        return self.network.summed_s(template, places, size_bytes, layout) if len(places) > 1 else 0.0

    def weigh(
        self,
        mix: Mix,
        *,
        schedule: ScheduleName = "1F1B",
        layout: Layout = "stages",
        zero: Sequence[int] = ZERO_LEVELS,
        below_s: float = inf,
    ) -> Weighed | None:
        """The best shares of the batch for these pipelines at the best of some levels of state sharding, and what they take; None if
        they do not fit, or one would have nothing.

        Nor is a plan played to its end whose step is seen to be no shorter than ``below_s``.
        """
        if not mix or not self._enough_devices(mix):
            return None
        best: Weighed | None = None
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
        """Levels that fit and the most micro-batches of each template, so that none is faster than one before it that is not in want
        of memory.
        """
        if not _shared(mix):
            zero = (0,)
        first = [(level, most) for level in zero if level < 2 and (most := self._room(mix, schedule, level))]
        if len(first) > 1:
            first.sort(key=lambda entry: (sum(self.after_s(mix, layout, entry[0])), entry[0]))
        yield from first
        for level in sorted(zero):
            if level > 1 and (most := self._room(mix, schedule, level)):
                yield level, most

    def _room(self, mix: Mix, schedule: ScheduleName, zero: int) -> list[int]:
        """Of a pipeline of each template the most micro-batches; none at all where one has no room for any."""
        replicas = sum(count for _, count in mix)
        found = []
        for template, _ in mix:
            most = self.room.most_micro_batches(template, schedule, replicas, zero)
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
    ) -> tuple[Weighed | None, bool]:
        """And whether memory limits no pipeline: then no level that needs less memory can be faster."""
        replicas = sum(count for _, count in mix)
        free = all(own == self.room.whole(template) for own, (template, _) in zip(most, mix, strict=True))
        sync_s, update_s = self.after_s(mix, layout, zero)
        if sync_s == inf:
            return None, True
        by_template = self.played(mix, schedule, layout, zero)
        played = [by_template[template] for template, _ in mix]

        def fits(number: int, count: int) -> bool:
            return mix[number][0].chunks == 1 or self.room.fits(mix[number][0], count, schedule, replicas, zero)

        counts = micro_batches_each(mix, self.global_batch, played, most, below_s - sync_s - update_s, fits)
        if counts is None:
            return None, free
        groups = groups_of(mix, self.global_batch, counts)
        several = [g for g in groups if g.template.chunks > 1]
        if not all(self.room.fits(g.template, g.num_microbatches, schedule, replicas, zero) for g in several):
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
        sent_usd = usd(self.exchanges(mix, layout), zero, max(counts)) if self.fleet.usd_per_byte else 0.0
        free = free or all(count < own for count, own in zip(counts, most, strict=True))
        return Weighed(plan=plan, predicted=self._spent.of(plan, seconds, sent_usd, replicas)), free

    def _step_s(
        self, mix: Mix, groups: Sequence[TemplateGroup], schedule: ScheduleName, layout: Layout, zero: int
    ) -> float:
        """From level 2 on never less than that of the level below, all of whose exchanges there are too.

        What lies at the end of the step at the lower level hides at the higher one behind more, as far as is known of it.
        """
        played = self.played(mix, schedule, layout, zero)
        pipelines_s = max(played[g.template].seconds(g.num_microbatches) for g in groups)
        own = pipelines_s + sum(self.after_s(mix, layout, zero))
        return own if zero < 2 else max(own, self._step_s(mix, groups, schedule, layout, zero - 1))

    def bound_s(self, mix: Mix, *, split: bool = True) -> float:
        """Never more than the step of any `weigh` of these pipelines: messages are those of the better layout, and nothing is exchanged.

        ``split``: under schedules that run the halves of a backward apart, too.
        """
        lines = [(self.alone.lines(template, split), count * template.micro_batch) for template, count in mix]
        if not all(own for own, _ in lines):
            return inf
        return time_until(lines, [self.global_batch] * len(lines), self.global_batch)

    def least_after_s(self, mix: Mix, layouts: Sequence[Layout], zero: Sequence[int]) -> float:
        """Never more than what any `weigh` of these pipelines takes after them, of some layouts and levels; infinite if they cannot be.

        From level 2 on there is all that there is at level 1 (see `_step_s`).
        """
        if not self._enough_devices(mix):
            return inf
        levels = sorted({min(level, 1) for level in zero}) if _shared(mix) else [0]
        return min(sum(self.after_s(mix, layout, level)) for layout in layouts for level in levels)

    def could_take(self, mix: Mix, seconds: float, *, split: bool = True) -> bool:
        """Whether `bound_s` is within so many seconds."""
        if seconds <= 0:
            return False
        done = 0.0
        for template, count in mix:
            lines = self.alone.lines(template, split)
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

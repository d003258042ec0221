"""The time of one pipeline: its stages, the messages between them, and the makespan for any number of micro-batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf

from heterodyne.plan.schedules.bounds import place_lines
from heterodyne.plan.schedules.makespans import Makespans
from heterodyne.plan.schedules.times import StageTimes, blocked
from heterodyne.recent import Recent
from heterodyne.search.fleet.plan import LAYOUTS, Layout, ScheduleName, Template
from heterodyne.search.fleet.ring_network import RingNetwork
from heterodyne.search.fleet.stage_tables import StageTables

__all__ = ["PipelineTime"]

_SLACK = 1e-12


@dataclass(frozen=True, kw_only=True)
class PipelineTime:
    """Times of templates over one fleet, cached.

    Args:
        overlap_sends: whether a device computes while it sends; else it waits until the next stage has received; ``duplex``: whether two
            messages between neighbours go both ways at once (see `Software`).
        played: one counter, the actions played so far under schedules that have to be played action by action.
    """

    tables: StageTables
    network: RingNetwork
    overlap_sends: bool
    duplex: bool = True
    played: list[int] = field(default_factory=lambda: [0], repr=False)
    _timed: dict[Template, tuple[StageTimes, ...]] = field(default_factory=dict, repr=False)
    _makespans: dict[tuple[Template, ScheduleName, Layout], Makespans] = field(default_factory=dict, repr=False)
    _bounds: dict[tuple[Template, bool], list[tuple[float, float]]] = field(default_factory=dict, repr=False)
    _sent: Recent[object, list[float]] = field(default_factory=lambda: Recent(1024), repr=False)

    def makespans(self, template: Template, schedule: ScheduleName, layout: Layout) -> Makespans:
        """Seconds of the pipeline under a schedule, as a function of the number of micro-batches."""
        key = (template, schedule, layout)
        if key not in self._makespans:
            stages, sends = self._waiting(template, self._sends(template, layout))
            self._makespans[key] = Makespans(
                stages, sends, schedule, template.chunks, self._busy(template, layout), self.played
            )
        return self._makespans[key]

    def _waiting(self, template: Template, sends: list[float]) -> tuple[Sequence[StageTimes], list[float]]:
        """Stage times and message times; where sends do not overlap, their time is part of that of the stages."""
        stages = self._times(template)
        if self.overlap_sends:
            return stages, sends
        return blocked(stages, sends, duplex=self.duplex), [0.0] * len(sends)

    def _busy(self, template: Template, layout: Layout) -> list[float]:
        """Seconds that each message keeps its link busy, without its latency. Where sends do not overlap, stages are busy with them."""
        if not self.overlap_sends:
            return []
        pairs = zip(self._sends(template, layout), self._sends(template, layout, empty=True), strict=True)
        return [max(0.0, all_s - latency_s) if all_s < inf else 0.0 for all_s, latency_s in pairs]

    def _times(self, template: Template) -> tuple[StageTimes, ...]:
        """Forward and backward seconds of each stage."""
        if template not in self._timed:
            own = list(zip(template.stages, self.tables.of(template), strict=True))
            self._timed[template] = tuple(
                StageTimes.halved(
                    forward_s=table.forward_s(stage.start, stage.stop),
                    backward_s=table.backward_s(stage.start, stage.stop, stage.recompute),
                    recompute_s=table.recompute_s(stage.start, stage.stop) if stage.recompute else 0.0,
                )
                for stage, table in own
            )
        return self._timed[template]

    def _sends(self, template: Template, layout: Layout, *, empty: bool = False) -> list[float]:
        """Seconds of the message from each stage to the next one (``empty``: of one without content); shared by pipelines on the same
        devices with the same message sizes.
        """
        stages, tables = template.stages, self.tables.of(template)
        sizes = [0.0 if empty else table.output_bytes(s.stop) for s, table in zip(stages[:-1], tables, strict=False)]
        places = tuple((home.pool, home.widths) for home in template.homes)
        return self._sent.get(
            (places, template.chunks, tuple(sizes), layout),
            lambda: [self.network.send_s(template, number, size, layout) for number, size in enumerate(sizes)],
        )

    def least_sends(self, template: Template) -> list[float]:
        """Seconds of the message from each stage to the next one, in the layout in which it is faster."""
        return [min(own) for own in zip(*(self._sends(template, layout) for layout in LAYOUTS), strict=True)]

    def longest_s(self, template: Template) -> float:
        """Seconds per micro-batch of the bottleneck pipeline rank."""
        return max((max(_SLACK, each) for _, each in self.lines(template, True)), default=inf)

    def lines(self, template: Template, split: bool) -> list[tuple[float, float]]:
        """See `place_lines`; none where stages are not joined."""
        if (template, split) not in self._bounds:
            least = self.least_sends(template)
            stages, sends = self._waiting(template, least)
            known = inf not in least
            self._bounds[template, split] = place_lines(stages, sends, template.places, split=split) if known else []
        return self._bounds[template, split]

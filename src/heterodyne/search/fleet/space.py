"""The search space and the work limit: work is counted, not timed, so the same input gives the same plan."""

from __future__ import annotations

from dataclasses import dataclass, replace

from heterodyne.plan.capabilities import SHARDING, runs_at_all
from heterodyne.search.fleet.plan import INTERLEAVED, SPLIT, ZERO_LEVELS, Layout, ScheduleName, TemplatePlan

__all__ = ["Space"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Space:
    """The plans that may be made.

    Args:
        pools: by name; None: all.
        schedules: of which a plan has one; at least one that has one stage a place.
        max_chunks: stages on each place, under the schedules that interleave them.
        max_stages: of a pipeline; ``max_pools``: in one pipeline; ``max_pipelines``: beside each other; ``max_templates``: kinds of these
            (1: all pipelines are alike).
        max_width, max_context, max_data: of a stage (`Widths`).
        runnable: only stages that this library runs: experts are sharded overly where their layers do.
        micro_batches: sizes; None: the powers of two up to the global batch of which the costs are known, and of few devices what each
            has of it if all have as much.
        zero: levels of state sharding, of `ZERO_LEVELS`, ascending.
        few_devices: up to so many in a fleet whole numbers matter, and more is tried that only differs in these.
        columns: kinds of pipelines among which counts are chosen exactly.
        work: stages that are played while the best mixes are improved.
    """

    pools: tuple[str, ...] | None = None
    max_stages: int = 64
    max_pools: int | None = None
    max_width: int = 1024
    max_context: int = 1024
    max_data: int = 1024
    max_pipelines: int | None = None
    max_templates: int | None = None
    runnable: bool = False
    micro_batches: tuple[int, ...] | None = None
    recompute: bool = True
    zero: tuple[int, ...] = ZERO_LEVELS
    schedules: tuple[ScheduleName, ...] = ("1F1B", "GPipe", "ZBH1", "ZBH2", "Interleaved1F1B", "InterleavedZeroBubble")
    max_chunks: int = 4
    layouts: tuple[Layout, ...] = ("stages", "pipelines")
    few_devices: int = 8
    columns: int = 40
    work: int = 5_000

    def __post_init__(self) -> None:
        if not set(self.schedules) - INTERLEAVED:
            raise ValueError(f"schedules {self.schedules} leave none for pipelines with one stage on each place")

    def that_runs(self) -> Space:
        """Without the plans that this library does not run, whatever the model (`plan.capabilities`).

        Also without ZeRO levels above 1, which the runtime runs in another order than is counted here, stage after stage:
        `search.parameter_sharding` finds these.
        """
        levels = tuple(level for level in self.zero if level < 2 and all(map(runs_at_all, SHARDING[:level])))
        return replace(self, zero=levels or (0,), runnable=True)

    def holds(self, plan: TemplatePlan) -> bool:
        """Whether a plan is one of these, by its pipelines."""
        templates = {group.template for group in plan.groups}
        stages = {stage for template in templates for stage in template.stages}
        limits = (
            (self.max_stages, max(len(template.stages) for template in templates)),
            (self.max_pools, max(len(template.devices) for template in templates)),
            (self.max_chunks, max(template.chunks for template in templates)),
            (self.max_pipelines, plan.pipelines),
            (self.max_templates, len(templates)),
            (self.max_width, max(stage.widths.tensor for stage in stages)),
            (self.max_context, max(stage.widths.context for stage in stages)),
            (self.max_data, max(stage.widths.data for stage in stages)),
        )
        return (
            all(most is None or has <= most for most, has in limits)
            and (self.pools is None or set(plan.devices) <= set(self.pools))
            and (self.micro_batches is None or {t.micro_batch for t in templates} <= set(self.micro_batches))
            and (self.recompute or not any(stage.recompute for stage in stages))
            and plan.zero in self.zero
            and plan.schedule in self.schedules
            and plan.layout in self.layouts
        )

    @property
    def splits(self) -> bool:
        """Whether some schedule runs the halves of a backward apart."""
        return not SPLIT.isdisjoint(self.schedules)

    @property
    def low_zero(self) -> int:
        """1, which fits wherever 0 does; 0 where level 1 is excluded, which is all that a single pipeline can do."""
        return 1 if 1 in self.zero else 0

    @property
    def high_zero(self) -> tuple[int, ...]:
        """The levels with traffic in every micro-batch."""
        return tuple(level for level in self.zero if level > 1)

    @property
    def first_schedules(self) -> tuple[ScheduleName, ...]:
        """The schedules under which mixes are found first: those with strong lower bounds."""
        plain = tuple(schedule for schedule in self.schedules if schedule not in SPLIT | INTERLEAVED)
        return plain or self.plain_schedules

    @property
    def plain_schedules(self) -> tuple[ScheduleName, ...]:
        """Those with one stage on each place."""
        return tuple(schedule for schedule in self.schedules if schedule not in INTERLEAVED)

    @property
    def interleaved_schedules(self) -> tuple[ScheduleName, ...]:
        """Those with several."""
        return tuple(s for s in self.schedules if s in INTERLEAVED and self.max_chunks > 1)

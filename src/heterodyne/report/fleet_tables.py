"""Tables of what was planned for a fleet: the pools, the best plan, those that come next, what time and money trade for."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from heterodyne.cluster.fleet import Fleet, Wire
from heterodyne.report.rows import Column, Rows, columns
from heterodyne.report.words import DASH, byte_size, change, digits, percent, seconds
from heterodyne.search.fleet.explain import why_more
from heterodyne.search.fleet.plan import FleetPlan, Stage, Template
from heterodyne.search.fleet.planner import Planned
from heterodyne.search.fleet.weighed import Weighed
from heterodyne.units import counted, format_bandwidth

__all__ = ["changed_rows", "fleet_rows", "frontier_rows", "in_short", "ranked_rows", "stage_rows"]

_SHARED = ("", "optimizer states", "optimizer states and gradients", "optimizer states, gradients and parameters")

_IN_SHORT = 2
"""Groups of pipelines that a line has room for."""


def fleet_rows(fleet: Fleet) -> Rows:
    """A row a pool."""
    return Rows(
        title=f"Fleet {fleet.name}: {counted(fleet.devices, 'device')} of {counted(len(fleet.kinds), 'kind')}",
        columns=columns(
            "pool", "kind", ">nodes", ">devices", ">memory", ">inside a node", ">between nodes", ">usd/h each"
        ),
        rows=tuple(
            (
                pool.name,
                pool.kind,
                str(pool.nodes),
                f"{pool.devices:,}",
                byte_size(pool.memory_bytes),
                _speed(pool.inside),
                _speed(fleet.wire(pool, pool)),
                DASH if pool.usd_per_device_hour is None else digits(pool.usd_per_device_hour),
            )
            for pool in fleet.pools
        ),
    )


def stage_rows(fleet: Fleet, plan: FleetPlan, expert_width: Callable[[Template, int], int]) -> Rows:
    """A row for each run of alike stages of each group of pipelines; with several stages on each place, a row for each place.

    ``expert_width``: devices of a stage over which its experts lie.
    """
    rows: list[tuple[str, ...]] = []
    for group in plan.groups:
        first = True
        for number, stage, alike in _rows_of(group.template):
            rows.append(
                (
                    f"{group.replicas:,} x" if first else "",
                    f"{group.num_microbatches} x {group.template.micro_batch}" if first else "",
                    _numbers(group.template, number, alike),
                    stage.pool,
                    fleet.pool(stage.pool).kind,
                    _shared_by(stage, expert_width(group.template, number)),
                    _layers(stage, alike) if group.template.chunks == 1 else _spans(group.template, number),
                    "all" if stage.recompute else "none",
                )
            )
            first = False
    used = plan.devices
    idle = [
        f"{pool.devices - used.get(pool.name, 0):,} of {pool.name}"
        for pool in fleet.pools
        if used.get(pool.name, 0) < pool.devices
    ]
    return Rows(
        title=f"The plan: {counted(plan.pipelines, 'pipeline')}, schedule {plan.schedule}"
        + (f", {_SHARED[plan.zero]} sharded over replicas (ZeRO-{plan.zero})" if plan.zero else ""),
        columns=columns(
            ">pipelines", ">micro-batches", ">stage", "pool", "kind", ">devices each", ">layers", "recompute"
        ),
        rows=tuple(rows),
        notes=(*((f"Left out: {', '.join(idle)}.",) if idle else ()), *_not_full(plan)),
    )


def _not_full(plan: FleetPlan) -> tuple[str, ...]:
    over = sum(group.capacity for group in plan.groups) - plan.global_batch
    return (f"The last micro-batches are smaller, by {counted(over, 'sample')} in all.",) if over else ()


def ranked_rows(found: Planned, *, seq: int | None) -> Rows:
    """The best plan and those that come next, what each takes, and why that is more."""
    best, others = found.best, found.runners_up
    return Rows(
        title="What it takes, and what comes next",
        columns=_plan_columns(seq),
        rows=tuple(_figures(weighed, best, seq) for weighed in (best, *others)),
        marked=frozenset({0}),
        notes=tuple(
            f"Line {number}: {why_more(other, best, found.objective)}." for number, other in enumerate(others, start=2)
        ),
    )


def frontier_rows(frontier: Sequence[Weighed], *, seq: int | None) -> Rows:
    """Plans that no other one beats in time, money and devices at once."""
    fastest = frontier[0]
    return Rows(
        title="Time, money and devices: no plan is better in one without being worse in another",
        columns=_plan_columns(seq),
        rows=tuple(_figures(weighed, fastest, seq) for weighed in frontier),
    )


def changed_rows(today: Weighed, then: Weighed, what: str) -> Rows:
    """Today's fleet next to the changed one."""
    lines = (
        (
            "step",
            seconds(today.predicted.step_s),
            seconds(then.predicted.step_s),
            _by(today.predicted.step_s, then.predicted.step_s),
        ),
        (
            "samples/s",
            digits(today.predicted.samples_per_s),
            digits(then.predicted.samples_per_s),
            _by(today.predicted.samples_per_s, then.predicted.samples_per_s),
        ),
        (
            "devices used",
            f"{today.predicted.devices:,}",
            f"{then.predicted.devices:,}",
            _by(today.predicted.devices, then.predicted.devices),
        ),
        (
            "usd/h",
            _money(today.predicted.usd_per_hour),
            _money(then.predicted.usd_per_hour),
            _by(today.predicted.usd_per_hour, then.predicted.usd_per_hour),
        ),
        (
            "usd/step",
            _money(today.predicted.usd),
            _money(then.predicted.usd),
            _by(today.predicted.usd, then.predicted.usd),
        ),
    )
    return Rows(title=f"What if: {what}", columns=columns("", ">today", ">then", ">change"), rows=lines)


def in_short(plan: FleetPlan) -> str:
    """``4 x (8 x H100 tensor 4 x data 2, 2 x L40S, 2 stages each) + 2 x (...)``: pools, places, widths, stages on each place.

    Of many groups the largest.
    """
    parts = []
    largest = sorted(plan.groups, key=lambda group: -group.replicas * sum(group.template.devices.values()))
    for group in largest[:_IN_SHORT]:
        stages = ", ".join(
            f"{alike} x {stage.pool}" + (f" {stage.widths.in_words}" if stage.devices > 1 else "")
            for _, stage, alike in _runs(group.template.homes, widths_only=True)
        )
        chunks = f", {group.template.chunks} stages each" if group.template.chunks > 1 else ""
        parts.append(f"{group.replicas} x ({stages}{chunks})")
    more = len(plan.groups) - len(parts)
    return " + ".join(parts) + (f" + {more} more kinds of pipelines" if more else "")


def _plan_columns(seq: int | None) -> tuple[Column, ...]:
    """Of `_figures`."""
    tokens = (">tokens/s",) if seq else ()
    return columns(
        "plan",
        ">step",
        "",
        ">samples/s",
        *tokens,
        ">devices",
        ">usd/h",
        ">usd/step",
        ">J/step",
        ">most memory",
        ">fullest device",
    )


def _figures(weighed: Weighed, base: Weighed, seq: int | None) -> tuple[str, ...]:
    own = weighed.predicted
    return (
        in_short(weighed.plan),
        seconds(own.step_s),
        "" if weighed is base else change(own.step_s / base.predicted.step_s - 1),
        digits(own.samples_per_s),
        *((f"{own.samples_per_s * seq:,.0f}",) if seq else ()),
        f"{own.devices:,}",
        _money(own.usd_per_hour),
        _money(own.usd),
        _money(own.joules),
        byte_size(own.peak_bytes),
        f"{byte_size(own.fullest_bytes)}, {percent(own.peak_share)}",
    )


def _runs(stages: Sequence[Stage], *, widths_only: bool = False) -> Iterable[tuple[int, Stage, int]]:
    """The number of the first, and how many are alike behind each other: the same pool, width and number of layers."""

    def key(stage: Stage) -> tuple[object, ...]:
        own: tuple[object, ...] = (stage.pool, stage.widths)
        return own if widths_only else (*own, stage.stop - stage.start, stage.recompute)

    start = 0
    for number in range(1, len(stages) + 1):
        if number == len(stages) or key(stages[number]) != key(stages[start]):
            yield start, stages[start], number - start
            start = number


def _shared_by(stage: Stage, expert_width: int) -> str:
    """``8: tensor 4 x data 2, experts 8``."""
    told = [stage.widths.in_words] if stage.devices > 1 else []
    told += [f"experts {expert_width}"] if expert_width > 1 else []
    return f"{stage.devices}: {', '.join(told)}" if told else "1"


def _rows_of(template: Template) -> Iterable[tuple[int, Stage, int]]:
    if template.chunks == 1:
        return _runs(template.stages)
    return ((place, home, 1) for place, home in enumerate(template.homes))


def _numbers(template: Template, number: int, alike: int) -> str:
    """``4``, ``4 .. 7`` for alike stages, ``0, 4, 8`` for those of a place."""
    if template.chunks > 1:
        return ", ".join(map(str, range(number, len(template.stages), template.places)))
    return str(number) if alike == 1 else f"{number} .. {number + alike - 1}"


def _spans(template: Template, place: int) -> str:
    """``0-3, 8-11``: the layers of each stage of a place, counted from 0."""
    return ", ".join(
        str(stage.start) if stage.stop - stage.start == 1 else f"{stage.start}-{stage.stop - 1}"
        for stage in template.stages[place :: template.places]
    )


def _layers(stage: Stage, alike: int) -> str:
    count = stage.stop - stage.start
    return f"{count}" if alike == 1 else f"{count} each"


def _speed(wire: Wire | None) -> str:
    return DASH if wire is None else format_bandwidth(wire.bandwidth_bytes_per_s)


def _money(value: float | None) -> str:
    return DASH if value is None else digits(value)


def _by(before: float | None, after: float | None) -> str:
    return DASH if not before or after is None else change(after / before - 1)

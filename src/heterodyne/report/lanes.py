"""A timeline of one step, laid out: each rank a row with two lanes, each action a bar.

Along time the places are percent of the axis, so that a page can stretch it; across they are pixels. Both timelines of a run
are laid out on the same axis, so that a bar above and a bar below of the same width take the same time. What a rank sends and what it
waits to receive overlap in time, so they halve the lower lane.
"""

from __future__ import annotations

from dataclasses import dataclass

from heterodyne.report.axis import round_ticks
from heterodyne.report.line_chart import Tick
from heterodyne.report.palette import event_key
from heterodyne.report.words import kind_name
from heterodyne.timeline import Timeline
from heterodyne.units import format_seconds

__all__ = ["Bar", "Lanes", "Row", "lanes"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Bar:
    """``x`` and ``width`` in percent of the axis, ``y`` and ``height`` in pixels. ``fine``: too narrow for an outline.

    ``key``: of its colour in the palette.
    """

    kind: str
    key: str
    x: float
    width: float
    y: float
    height: float
    tip: str
    fine: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    rank: int
    device: str
    y: float
    height: float


@dataclass(frozen=True, kw_only=True)
class Lanes:
    """``end`` is where the step ends, in percent; ``plot_height`` is the part above the tick labels."""

    title: str
    span_s: float
    end: float
    rows: tuple[Row, ...]
    bars: tuple[Bar, ...]
    ticks: tuple[Tick, ...]
    plot_height: float
    small: bool


def lanes(
    timeline: Timeline, title: str, axis_s: float, names: tuple[str, ...] = (), *, by_stage: bool = False
) -> Lanes:
    """Lay out the events of one step over an axis from 0 to ``axis_s`` seconds.

    Args:
        timeline: events counted from the start of the step, as `Timeline.of_step` gives them.
        axis_s: the length of the axis; at least the span of the timeline, above 0.
        names: a name for each rank instead of the device id.
        by_stage: passes have the colour of their stage instead of that of their kind.
    """
    ranks = len(timeline.devices)
    compute, comm, gap = (20.0, 9.0, 9.0) if ranks <= 8 else (12.0, 6.0, 5.0) if ranks <= 24 else (7.0, 3.0, 2.0)
    pitch = compute + comm + 1 + gap
    top = {rank: gap / 2 + rank * pitch for rank in range(ranks)}
    bars = tuple(
        Bar(
            kind=event.kind,
            key=event_key(event, by_stage=by_stage),
            x=100 * event.start_s / axis_s,
            width=100 * event.seconds / axis_s,
            y=top[event.rank] + (0 if event.lane == "compute" else compute + 1 + _within(event.kind)[0] * comm),
            height=compute if event.lane == "compute" else _within(event.kind)[1] * comm,
            tip=f"{event.name} · {kind_name(event.kind)} · {format_seconds(event.seconds)} · from {format_seconds(event.start_s)}",
            fine=event.seconds < 0.002 * axis_s,
        )
        for event in timeline.events
        if event.rank in top
    )
    return Lanes(
        title=title,
        span_s=timeline.span_s,
        end=100 * timeline.span_s / axis_s,
        rows=tuple(
            Row(rank=rank, device=names[rank] if names else device, y=top[rank], height=compute + comm + 1)
            for rank, device in enumerate(timeline.devices)
        ),
        bars=bars,
        ticks=tuple(Tick(at=100 * t / axis_s, text=format_seconds(t)) for t in round_ticks(0.0, axis_s, 8)),
        plot_height=ranks * pitch,
        small=ranks > 24,
    )


def _within(kind: str) -> tuple[float, float]:
    """The vertical position of a kind within the communication lane, and the fraction of the lane that it takes."""
    if kind.startswith("SEND"):
        return 0.0, 0.5
    return (0.5, 0.5) if kind.startswith("RECV") else (0.0, 1.0)

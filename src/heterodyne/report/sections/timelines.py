"""One predicted step above one measured step, and why their lengths are not the step times of the first section."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from heterodyne.report.axis import round_ticks
from heterodyne.report.compare import Claim
from heterodyne.report.line_chart import Tick
from heterodyne.report.palette import SERIES, STAGE_COLOURS, event_key, has_stages, kind_key, stage_of
from heterodyne.report.run import Run
from heterodyne.report.step_times import in_order, median_step, step_spans, typical
from heterodyne.report.words import kind_name, seconds
from heterodyne.timeline import Event, Timeline
from heterodyne.units import format_seconds

__all__ = ["lanes", "legend", "lengths_in_words", "timeline_section"]


def timeline_section(run: Run, step: Claim) -> dict[str, Any] | None:
    """Predicted above measured on one axis; of the measured steps the one of median length. ``step``: its time, as `compare` has it."""
    shown: list[tuple[str, Timeline]] = []
    note = ""
    if (simulated := typical(run.simulated)) is not None:
        shown.append(("Predicted", simulated))
    if run.measured is not None and (number := median_step(run.measured)) is not None:
        shown.append(("Measured", run.measured.of_step(number)))
        spans = step_spans(run.measured)
        note = f"Measured is step {number}, the one of median length among the last {len(spans)}, whose actions were recorded"
        note += f" ({seconds(min(spans.values()))} to {seconds(max(spans.values()))})." if len(spans) > 1 else "."
    axis_s = 1.005 * max((timeline.span_s for _, timeline in shown), default=0.0)  # room for the mark at the end
    if axis_s <= 0:
        return None
    times = {"Predicted": step.predicted, "Measured": step.measured}
    words = [lengths_in_words(title, timeline.span_s, times[title]) for title, timeline in shown]
    note = " ".join([note, *filter(None, words)]).strip()
    events = [event for _, timeline in shown for event in timeline.events]
    by_stage = has_stages(events)
    laid: list[_Lanes] = [lanes(timeline, title, axis_s, by_stage=by_stage) for title, timeline in shown]
    return {"lanes": laid, "by_stage": by_stage, "legend": legend(events), "note": note}


def lengths_in_words(title: str, span_s: float, step_s: float | None) -> str:
    """Return why a timeline is longer or shorter than the step time; "" where both are written alike, or one is not known.

    A step time is from the begin of a step on rank 0 to its end (measured: a median over all steps); a timeline goes from the first
    action of any rank to the last action of any.
    """
    if step_s is None or seconds(span_s) == seconds(step_s):
        return ""
    both = f"{title}: the timeline is {seconds(span_s)} long, the step time is {seconds(step_s)}"
    measured = title == "Measured"
    if span_s > step_s:
        slower = ", and the step time is a median over all steps" if measured else ""
        return f"{both}: ranks that are done early begin the next step while others still work{slower}."
    reading = (
        "also counts reading the batch and is a median over all steps"
        if measured
        else "also counts what comes between two steps"
    )
    return f"{both}: the step time {reading}."


_OF_BOTH_DIRECTIONS = {"SEND": "send", "RECV": "wait for a message"}


def legend(events: Sequence[Event]) -> tuple[tuple[str, str], ...]:
    """``(key in the palette, words)``, each key once; stages whose hues are the same stand together."""
    by_stage = has_stages(events)
    stages: dict[int, set[int]] = {}
    kinds = set()
    for event in events:
        if event_key(event, by_stage=by_stage) in STAGE_COLOURS:
            stages.setdefault(stage_of(event.name) % SERIES, set()).add(stage_of(event.name))
        else:
            kinds.add(event.kind)
    named: dict[str, str] = {}
    for kind in in_order(kinds):
        key = kind_key(kind)
        named.setdefault(key, _OF_BOTH_DIRECTIONS.get(key, kind_name(kind)))
    entries = [(f"B{hue}", f"stage {', '.join(map(str, sorted(of)))}") for hue, of in sorted(stages.items())]
    return (*entries, *named.items())


# A timeline of one step, laid out: each rank a row with two lanes, each action a bar.
#
# Along time the places are percent of the axis, so that a page can stretch it; across they are pixels. Both timelines of a run
# are laid out on the same axis, so that a bar above and a bar below of the same width take the same time. What a rank sends and what it
# waits to receive overlap in time, so they halve the lower lane.
@dataclass(frozen=True, kw_only=True, slots=True)
class _Bar:
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
class _Row:
    rank: int
    device: str
    y: float
    height: float


@dataclass(frozen=True, kw_only=True)
class _Lanes:
    """``end`` is where the step ends, in percent; ``plot_height`` is the part above the tick labels."""

    title: str
    span_s: float
    end: float
    rows: tuple[_Row, ...]
    bars: tuple[_Bar, ...]
    ticks: tuple[Tick, ...]
    plot_height: float
    small: bool


def lanes(
    timeline: Timeline, title: str, axis_s: float, names: tuple[str, ...] = (), *, by_stage: bool = False
) -> _Lanes:
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
        _Bar(
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
    return _Lanes(
        title=title,
        span_s=timeline.span_s,
        end=100 * timeline.span_s / axis_s,
        rows=tuple(
            _Row(rank=rank, device=names[rank] if names else device, y=top[rank], height=compute + comm + 1)
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

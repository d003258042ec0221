"""One predicted step above one measured step, and why their lengths are not the step times of the first section."""

from __future__ import annotations

from typing import Any

from heterodyne.report.compare import Claim
from heterodyne.report.lanes import Lanes, lanes
from heterodyne.report.legend import legend
from heterodyne.report.palette import has_stages
from heterodyne.report.run import Run
from heterodyne.report.step_times import median_step, step_spans, typical
from heterodyne.report.words import seconds
from heterodyne.timeline import Timeline

__all__ = ["lengths_in_words", "timeline_section"]


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
    laid: list[Lanes] = [lanes(timeline, title, axis_s, by_stage=by_stage) for title, timeline in shown]
    return {"lanes": laid, "by_stage": by_stage, "legend": legend(events), "note": note}


def lengths_in_words(title: str, span_s: float, step_s: float | None) -> str:
    """Why a timeline is longer or shorter than the step time; "" where both are written alike, or one is not known.

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

"""One trace of both timelines for Perfetto: a process a rank, first the measured ones, then the simulated ones.

The simulated step is shifted to where the measured step of typical length begins, so that the two stand side by side.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from heterodyne.report.run import Run
from heterodyne.report.step_times import median_step
from heterodyne.text_files import write_text
from heterodyne.timeline import Timeline

__all__ = ["SIMULATED_PID", "trace", "write_trace"]

SIMULATED_PID: Final = 100_000
"""Process ids of the trace: a measured rank is its own number, a simulated one has this added."""


def trace(run: Run) -> dict[str, Any]:
    """The trace-event JSON of a run; without events if it left no timeline."""
    measured, simulated = run.measured, run.simulated
    events: list[dict[str, Any]] = []
    if measured is not None:
        events += _group(measured, "measured", 0)
    if simulated is not None:
        shifted = _shifted(simulated, _typical_start(measured)) if measured is not None else simulated
        events += _group(shifted, "predicted", SIMULATED_PID)
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"run": run.name}}


def write_trace(run: Run, path: Path) -> Path:
    """Write `trace` as a file that Perfetto (ui.perfetto.dev) and chrome://tracing open."""
    write_text(path, json.dumps(trace(run), allow_nan=False))
    return path


def _group(timeline: Timeline, name: str, first_pid: int) -> list[dict[str, Any]]:
    content: Any = timeline.to_perfetto()["traceEvents"]
    events = []
    for event in content:
        moved = {**event, "pid": event["pid"] + first_pid}
        if event["name"] == "process_name":
            moved["args"] = {"name": f"{name} · {event['args']['name']}"}
        events.append(moved)
    events += [
        {"ph": "M", "pid": first_pid + rank, "name": "process_sort_index", "args": {"sort_index": first_pid + rank}}
        for rank in range(len(timeline.devices))
    ]
    return events


def _typical_start(measured: Timeline) -> float:
    step = median_step(measured)
    return min((event.start_s for event in measured.events if event.step == step), default=0.0)


def _shifted(timeline: Timeline, start_s: float) -> Timeline:
    offset = start_s - min((event.start_s for event in timeline.events), default=0.0)
    moved = (replace(e, start_s=e.start_s + offset, end_s=e.end_s + offset) for e in timeline.events)
    return replace(timeline, events=tuple(moved))

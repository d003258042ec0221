"""Where the time of a step goes, as stacked bars, rank by rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from heterodyne.plan.program import COLLECTIVES
from heterodyne.report.run import Run
from heterodyne.report.step_times import EXPOSED, IDLE, MESSAGES, StepTimes, by_rank, in_order, typical
from heterodyne.report.words import DASH, kind_name, percent, seconds

__all__ = ["time_section"]


def time_section(run: Run) -> dict[str, Any] | None:
    """Stacked bars: predicted and measured for each rank, on one scale; of the same steps that the timelines show."""
    predicted, measured = (
        {t.rank: t for t in by_rank(one)} if one else {} for one in (typical(run.simulated), typical(run.measured))
    )
    every = [*predicted.values(), *measured.values()]
    scale_s = max((t.span_s for t in every), default=0.0)
    if scale_s <= 0:
        return None
    kinds = in_order({kind for t in every for kind in t.kinds if kind not in (*COLLECTIVES, *MESSAGES)})
    parts = (*kinds, *((EXPOSED,) if any(t.exposed_s for t in every) else ()), IDLE)
    rows = [
        {
            "rank": rank,
            "device": run.devices[rank] if rank < len(run.devices) else "",
            "bars": [
                {"title": title, "segments": _segments(times[rank], parts, scale_s)}
                for title, times in (("predicted", predicted), ("measured", measured))
                if rank in times
            ],
            "busy": percent(1 - measured[rank].wait_s / measured[rank].span_s) if rank in measured else DASH,
        }
        for rank in sorted({*predicted, *measured})
    ]
    titles = [title for title, times in (("predicted", predicted), ("measured", measured)) if times]
    return {"rows": rows, "parts": [(part, kind_name(part)) for part in parts], "titles": titles}


def _segments(times: StepTimes, parts: Sequence[str], scale_s: float) -> list[dict[str, Any]]:
    shown = [(part, times.seconds(part)) for part in parts]
    return [
        {
            "part": part,
            "percent": 100 * value / scale_s,
            "tip": f"{kind_name(part)} · {seconds(value)} · {percent(value / times.span_s)} of the step",
        }
        for part, value in shown
        if value > 0
    ]  # fmt: skip

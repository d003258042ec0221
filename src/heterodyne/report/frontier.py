"""A picture of what time and money trade for: each plan that no other one beats is a point."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure

from heterodyne.report.palette import LIGHT
from heterodyne.search.fleet.weighed import Weighed

__all__ = ["frontier_picture"]

_TEXT, _LINE = "#1d2330", "#e3e5e9"


def frontier_picture(frontier: Sequence[Weighed], path: Path, *, title: str) -> Path:
    """Usd (or, without prices, devices) over seconds of a step, devices beside each point; the file's suffix says what is written."""
    figure = Figure(figsize=(7, 4.5), layout="constrained", facecolor="white")
    axis = figure.subplots()
    priced = all(weighed.predicted.usd is not None for weighed in frontier)
    across = [weighed.predicted.step_s for weighed in frontier]
    up = [(w.predicted.usd if priced else w.predicted.devices) or 0.0 for w in frontier]
    axis.plot(across, up, color=_LINE, linewidth=1, zorder=1)
    axis.scatter(across, up, color=LIGHT["c0"], zorder=2)
    for weighed, x, y in zip(frontier, across, up, strict=True):
        axis.annotate(
            f"{weighed.predicted.devices:,}", (x, y), xytext=(5, 5), textcoords="offset points", fontsize=8, color=_TEXT
        )
    axis.set_xlabel("seconds a step", color=_TEXT)
    axis.set_ylabel("usd a step" if priced else "devices", color=_TEXT)
    axis.set_title(f"{title} (beside the points: devices)", color=_TEXT, fontsize=11, loc="left")
    axis.set_xlim(left=0)
    axis.set_ylim(bottom=0)
    axis.grid(color=_LINE, linewidth=0.5)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=144)
    return path

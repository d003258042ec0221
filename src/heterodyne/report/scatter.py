"""A picture of what was foretold against what was measured: on the diagonal both are the same."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from matplotlib.figure import Figure

from heterodyne.report.palette import LIGHT

__all__ = ["Foretold", "scatter_picture"]

_TEXT, _LINE = "#1d2330", "#e3e5e9"
_HUES = 8
_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")


@dataclass(frozen=True, kw_only=True, slots=True)
class Foretold:
    """One point; seconds. ``kind``: points of a kind look alike."""

    kind: str
    simulated_s: float
    measured_s: float


def scatter_picture(points: Sequence[Foretold], path: Path, *, title: str, band: float) -> Path:
    """A mark for each point, and the band of relative errors up to ``band`` around the diagonal; the file's suffix says what is written."""
    figure = Figure(figsize=(6, 6), layout="constrained", facecolor="white")
    axis = figure.subplots()
    furthest = 1.08 * max([max(p.simulated_s, p.measured_s) for p in points], default=1.0)
    axis.fill_between(
        [0, furthest], [0, furthest * (1 - band)], [0, furthest * (1 + band)], color=_LINE, label=f"within {band:.0%}"
    )
    axis.plot([0, furthest], [0, furthest], color=_TEXT, linewidth=0.8)
    for number, kind in enumerate(dict.fromkeys(point.kind for point in points)):
        own = [point for point in points if point.kind == kind]
        axis.scatter(
            [point.measured_s for point in own],
            [point.simulated_s for point in own],
            color=LIGHT[f"c{number % _HUES}"],
            marker=_MARKERS[number % len(_MARKERS)],
            label=kind,
            zorder=2,
        )
    axis.set_xlim(0, furthest)
    axis.set_ylim(0, furthest)
    axis.set_aspect("equal")
    axis.set_title(title, color=_TEXT, fontsize=11, loc="left")
    axis.set_xlabel("measured, seconds a step", color=_TEXT)
    axis.set_ylabel("simulated, seconds a step", color=_TEXT)
    axis.legend(frameon=False, fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=144)
    return path

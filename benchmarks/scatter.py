"""A picture of what was predicted against what was measured: on the diagonal both are the same."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from matplotlib.figure import Figure

from heterodyne.report.palette import LIGHT

__all__ = ["Predicted", "scatter_picture"]

_TEXT, _LINE = "#1d2330", "#e3e5e9"
_HUES = 8
_WIDE = 100
_MANY, _MANY_POINT = 100, 12
"""Of so many points each is smaller."""
_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")


@dataclass(frozen=True, kw_only=True, slots=True)
class Predicted:
    """One point; seconds. ``kind``: points of a kind look alike."""

    kind: str
    simulated_s: float
    measured_s: float


def scatter_picture(points: Sequence[Predicted], path: Path, *, title: str, band: float) -> Path:
    """A mark for each point, and the band of relative errors up to ``band`` around the diagonal; the file's suffix says what is written.

    Where the longest step takes a hundred times the shortest or more, the axes are logarithmic.
    """
    figure = Figure(figsize=(6, 6), layout="constrained", facecolor="white")
    axis = figure.subplots()
    seconds = [of for p in points for of in (p.simulated_s, p.measured_s)] or [1.0]
    wide = max(seconds) >= _WIDE * min(seconds)
    ends = [min(seconds) / 1.5, 1.5 * max(seconds)] if wide else [0, 1.08 * max(seconds)]
    low, high = ([end * (1 + sign * band) for end in ends] for sign in (-1, 1))
    axis.fill_between(ends, low, high, color=_LINE, label=f"within {band:.0%}")
    axis.plot(ends, ends, color=_TEXT, linewidth=0.8)
    for number, kind in enumerate(dict.fromkeys(point.kind for point in points)):
        own = [point for point in points if point.kind == kind]
        axis.scatter(
            [point.measured_s for point in own],
            [point.simulated_s for point in own],
            color=LIGHT[f"c{number % _HUES}"],
            marker=_MARKERS[(number + number // _HUES) % len(_MARKERS)],
            label=kind,
            zorder=2,
            s=_MANY_POINT if len(points) > _MANY else None,
        )
    if wide:
        axis.set_xscale("log")
        axis.set_yscale("log")
    axis.set_xlim(*ends)
    axis.set_ylim(*ends)
    axis.set_aspect("equal")
    axis.set_title(title, color=_TEXT, fontsize=11, loc="left")
    axis.set_xlabel("measured, seconds a step", color=_TEXT)
    axis.set_ylabel("simulated, seconds a step", color=_TEXT)
    axis.legend(frameon=False, fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=144)
    return path

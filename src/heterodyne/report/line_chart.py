"""Line charts, laid out: where every line, mark and tick stands, in a square of 1000 by 1000 that the page stretches."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from heterodyne.report.axis import PlotAxis, axis_of
from heterodyne.report.words import digits

__all__ = ["LineChart", "Path", "Series", "Tick", "line_chart", "smoothed"]

Mark = Literal["line", "faint", "dashed", "dots", "band", "wide-dots"]
Point = tuple[float, float]
_MOST_POINTS = 600


@dataclass(frozen=True, kw_only=True)
class Series:
    """Points by rising x; ``colour`` counts the colours of the page. A series without a name has no place in legend and hover."""

    name: str
    points: tuple[Point, ...]
    colour: int
    mark: Mark = "line"


@dataclass(frozen=True, kw_only=True, slots=True)
class Tick:
    """``at`` in percent from the left or from the top."""

    at: float
    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Path:
    d: str
    colour: int
    mark: Mark


@dataclass(frozen=True, kw_only=True)
class LineChart:
    """``hover`` holds, for each named series, its points as [x in 0..1000, x as text, y as text]."""

    title: str
    x_title: str
    y_title: str
    x_ticks: tuple[Tick, ...]
    y_ticks: tuple[Tick, ...]
    paths: tuple[Path, ...]
    legend: tuple[Series, ...]
    hover: tuple[dict[str, object], ...]


def line_chart(
    title: str,
    series: Sequence[Series],
    *,
    x_title: str,
    y_title: str,
    y_text: Callable[[float], str] = digits,
    y_tick: Callable[[float], str] = "{:,g}".format,
    include_y: tuple[float, ...] = (),
    snug_y: bool = False,
    x_ticks: Sequence[float] | None = None,
) -> LineChart | None:
    """A chart of all series on common axes, None if there is not one finite point; the first series is drawn lowest.

    Args:
        y_text, y_tick: how a value reads where the pointer is, and on the axis.
        include_y: values that the axis must reach; ``snug_y``: it goes no further than to them and to the points.
        x_ticks: where the ticks stand, if not at round numbers.
    """
    finite = [_thinned([p for p in s.points if math.isfinite(p[0]) and math.isfinite(p[1])]) for s in series]
    if not any(finite):
        return None
    x = axis_of((p[0] for points in finite for p in points), snug=True, ticks=6)
    y = axis_of((p[1] for points in finite for p in points), include=include_y, ticks=4, snug=snug_y)
    drawn = list(zip(series, finite, strict=True))
    return LineChart(
        title=title,
        x_title=x_title,
        y_title=y_title,
        x_ticks=tuple(Tick(at=100 * x.place(v), text=f"{v:,g}") for v in (x.ticks if x_ticks is None else x_ticks)),
        y_ticks=tuple(Tick(at=100 * (1 - y.place(v)), text=y_tick(v)) for v in y.ticks),
        paths=tuple(Path(d=_path(points, x, y, s.mark), colour=s.colour, mark=s.mark) for s, points in drawn if points),
        legend=tuple(s for s, points in drawn if s.name and points),
        hover=tuple(
            {"name": s.name, "at": [[round(1000 * x.place(a), 2), f"{a:,g}", y_text(b)] for a, b in points]}
            for s, points in drawn
            if s.name and points
        ),
    )


def smoothed(points: Sequence[Point], window: int) -> tuple[Point, ...]:
    """The mean of the last ``window`` points at each, from the first whole window on."""
    if window <= 1:
        return tuple(points)
    values = [y for _, y in points]
    return tuple((points[i][0], sum(values[i - window + 1 : i + 1]) / window) for i in range(window - 1, len(points)))


def _path(points: Sequence[Point], x: PlotAxis, y: PlotAxis, mark: Mark) -> str:
    places = [(1000 * x.place(a), 1000 * (1 - y.place(b))) for a, b in points]
    if mark in ("dots", "wide-dots") or len(places) == 1:
        # A line of no length with round caps is a dot, and stays round however the chart is stretched.
        return "".join(f"M{a:.2f} {b:.2f}h0" for a, b in places)
    return "M" + "L".join(f"{a:.2f} {b:.2f}" for a, b in places)


def _thinned(points: list[Point]) -> list[Point]:
    """At most about `_MOST_POINTS` points: the lowest and the highest of each stretch, so that no spike is lost."""
    if len(points) <= _MOST_POINTS:
        return points
    size = math.ceil(2 * len(points) / _MOST_POINTS)
    kept: list[Point] = []
    for first in range(0, len(points), size):
        stretch = points[first : first + size]
        ends = {min(stretch, key=lambda p: p[1]), max(stretch, key=lambda p: p[1])}
        kept.extend(sorted(ends))
    return kept

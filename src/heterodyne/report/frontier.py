"""A picture of what time and money trade for: a staircase of the plans that no other one beats."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure

from heterodyne.plan.plan import Plan
from heterodyne.report.palette import LIGHT
from heterodyne.units import counted

__all__ = ["frontier_picture", "labelled", "stairs"]

_TEXT, _LINE, _FAINT = "#1d2330", "#e3e5e9", "#a9afba"
_STEPS = 1000
"""Steps on the axis of money: one costs a fraction of a cent."""
_APART = 0.09
"""Fraction of the length of an axis: labels closer to one another are left out."""

Point = tuple[float, float]


def frontier_picture(frontier: Sequence[Plan], path: Path, *, title: str) -> Path:
    """Usd (or, without prices, devices) over seconds of a step; the file's suffix says what is written.

    The line is the least cost of a step of at most so many seconds. Plans above it, which are on the frontier for their fewer devices
    alone, are small points.
    """
    figure = Figure(figsize=(7, 4.5), layout="constrained", facecolor="white")
    axis = figure.subplots()
    known = [(plan.predicted, plan.device_count) for plan in frontier if plan.predicted is not None]
    priced = all(predicted.usd is not None for predicted, _ in known)
    points = [(own.step_s, _STEPS * (own.usd or 0.0) if priced else float(count)) for own, count in known]
    least = stairs(points)
    on_it = [points[number] for number in least]
    right, top = 1.08 * max(x for x, _ in points), 1.12 * max(y for _, y in points)
    beside = [point for number, point in enumerate(points) if number not in least]
    if beside:
        right_of, above = zip(*beside, strict=True)
        axis.scatter(right_of, above, color=_FAINT, s=14, zorder=1, label="fewer devices for more money or time")
    across, up = zip(*on_it, strict=True)
    axis.step((*across, right), (*up, up[-1]), where="post", color=LIGHT["c0"], linewidth=1.5, zorder=2)
    axis.scatter(
        across, up, color=LIGHT["c0"], s=24, zorder=3, label=f"least {'usd' if priced else 'devices'} for the time"
    )
    for place in labelled(on_it, (right, top)):
        axis.annotate(
            counted(known[least[place]][1], "device"),
            on_it[place],
            xytext=(-5 if on_it[place][0] > 0.8 * right else 5, 6),
            ha="right" if on_it[place][0] > 0.8 * right else "left",
            textcoords="offset points",
            fontsize=8,
            color=_TEXT,
        )
    axis.set_xlabel("seconds a step", color=_TEXT)
    axis.set_ylabel(f"usd for {_STEPS:,} steps" if priced else "devices", color=_TEXT)
    axis.set_title(title, color=_TEXT, fontsize=11, loc="left")
    axis.set_xlim(0, right)
    axis.set_ylim(0, top)
    axis.grid(color=_LINE, linewidth=0.5)
    if beside:
        axis.legend(frameon=False, fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=144)
    return path


def stairs(points: Sequence[Point]) -> list[int]:
    """Return which points no other one beats in both figures, from left to right: each lower than the one before it."""
    found: list[int] = []
    for number in sorted(range(len(points)), key=points.__getitem__):
        if not found or points[number][1] < points[found[-1]][1]:
            found.append(number)
    return found


def labelled(points: Sequence[Point], ends: Point) -> list[int]:
    """Return which of the points of a staircase have room for a label: the ends first, then from left to right those that are far enough
    from all others that have one.
    """
    order = dict.fromkeys((0, len(points) - 1, *range(len(points))))
    kept: list[int] = []
    for number in order:
        x, y = points[number]
        close = (
            abs(x - points[other][0]) < 2 * _APART * ends[0] and abs(y - points[other][1]) < _APART * ends[1]
            for other in kept
        )
        if not any(close):
            kept.append(number)
    return sorted(kept)

"""Ways to train over several sites: a table, and a picture of seconds and bytes a day."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure

from heterodyne.report.palette import LIGHT
from heterodyne.report.rows import Rows, columns
from heterodyne.report.words import DASH, byte_size, digits, ratio, seconds
from heterodyne.search.fleet.sites import Way
from heterodyne.units import format_bytes, format_seconds

__all__ = ["sites_picture", "way_rows", "ways_json"]

_TEXT, _LINE = "#1d2330", "#e3e5e9"


def way_rows(ways: Sequence[Way], samples: int) -> Rows:
    """Return a row a way, in the order in which they are given; ``samples``: of a global batch."""
    found = [way for way in ways if math.isfinite(way.step_s)]
    best = min((way.step_s for way in found), default=math.inf)
    return Rows(
        title=f"Ways over the sites, {samples} samples a step",
        columns=columns(
            "way",
            "result",
            ">step",
            ">of the fastest",
            ">between sites a day",
            ">usd for 1M samples",
            "samples by site",
        ),
        rows=tuple(
            (
                way.name,
                "exact" if way.exact else "inexact",
                seconds(way.step_s),
                ratio(way.step_s / best) if math.isfinite(way.step_s) else DASH,
                byte_size(way.bytes_per_day) if math.isfinite(way.step_s) else DASH,
                DASH if way.usd is None else digits(way.usd / samples * 1e6),
                way.note or (", ".join(f"{name} {count}" for name, count in way.shares.items()) or DASH),
            )
            for way in ways
        ),
    )


def ways_json(ways: Sequence[Way]) -> str:
    """Return the same for programs, infinite numbers as null."""
    return json.dumps(
        [
            {
                "name": way.name,
                "exact": way.exact,
                "step_s": way.step_s if math.isfinite(way.step_s) else None,
                "bytes_per_day": way.bytes_per_day if math.isfinite(way.step_s) else None,
                "usd_per_step": way.usd,
                "shares": dict(way.shares),
                "outer": None if way.outer is None else vars(way.outer),
                "impossible": way.note or None,
            }
            for way in ways
        ],
        indent=2,
    )


def sites_picture(ways: Sequence[Way], path: Path, *, title: str) -> Path:
    """Draw seconds of a step and bytes a day of each way, on logarithmic axes; the file's suffix says what is written."""
    found = [way for way in ways if math.isfinite(way.step_s)][::-1]
    figure = Figure(figsize=(9, 0.9 + 0.45 * len(found)), layout="constrained", facecolor="white")
    left, right = figure.subplots(1, 2, sharey=True)
    names = [f"{way.name}{'' if way.exact else ' (inexact)'}" for way in found]
    panels = (
        (left, [way.step_s for way in found], format_seconds, "seconds a step", "c0"),
        (right, [way.bytes_per_day for way in found], format_bytes, "bytes between sites a day", "c1"),
    )
    for axis, values, words, label, colour in panels:
        shown = [value for value in values if value > 0]
        axis.barh(range(len(found)), values, color=LIGHT[colour], height=0.6)
        axis.set_xscale("log")
        axis.set_xlim(min(shown, default=1) / 3, max(shown, default=1) * 12)
        for place, value in enumerate(values):
            axis.annotate(
                words(value),
                (max(value, min(shown, default=1) / 3), place),
                xytext=(4, 0),
                textcoords="offset points",
                va="center",
                fontsize=8,
                color=_TEXT,
            )
        axis.set_xlabel(label, color=_TEXT, fontsize=9)
        axis.tick_params(labelsize=8)
        axis.grid(axis="x", color=_LINE, linewidth=0.5)
        axis.set_axisbelow(True)
    left.set_yticks(range(len(found)), names, fontsize=8)
    figure.suptitle(title, fontsize=10, color=_TEXT, x=0.01, ha="left")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=144)
    return path

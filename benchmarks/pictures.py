"""Pictures of results: a run, its loss beside the run on one device, ratios of a benchmark.

Drawn with matplotlib's objects, never with pyplot: nothing global is touched, no window is opened, and the file's suffix
(``.png`` or ``.svg``) decides what is written.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from heterodyne.errors import HeterodyneError
from heterodyne.report.line_chart import smoothed
from heterodyne.report.palette import LIGHT, STAGE_COLOURS, event_key, has_stages, kind_key
from heterodyne.report.run import Metrics, Run
from heterodyne.report.sections.timelines import legend
from heterodyne.report.step_times import in_order, typical
from heterodyne.report.words import kind_name
from heterodyne.timeline import Event, Timeline
from heterodyne.units import format_seconds

__all__ = ["RatioBar", "ratio_picture", "run_picture", "step_picture"]

_COMM = {
    "SEND": (0.2, 0.1),
    "RECV": (0.3, 0.1),
}  # they overlap in time, so each has half of the lane: its middle, its height
_BOTH_WAYS = {"SEND": "send", "RECV": "wait for a message"}
_TEXT, _SOFT, _LINE, _TRACK = "#1d2330", "#5d6677", "#e3e5e9", "#f1f2f4"


@dataclass(frozen=True, kw_only=True, slots=True)
class RatioBar:
    """One claim of a benchmark: the median ratio, its spread, and the bar that it should reach (None: no claim)."""

    name: str
    value: float
    low: float
    high: float
    bar: float | None = None


def run_picture(run: Run, path: Path, *, reference: Metrics | None = None, beside: str = "one device") -> Path:
    """The predicted timeline above the measured one on one time axis, the loss curves below, those ``beside`` it too.

    Raises HeterodyneError for a run that left neither timelines nor losses.
    """
    shown = [
        (title, one) for title, t in (("predicted", run.simulated), ("measured", run.measured)) if (one := typical(t))
    ]
    losses = bool(run.metrics.steps)
    if not shown and not losses:
        raise HeterodyneError(f"{run.directory} left neither timelines nor losses: there is nothing to draw")
    rows = [max(1.2, 0.4 * len(t.devices) + 0.5) for _, t in shown] + ([2.9] if losses else [])
    figure = Figure(figsize=(10, sum(rows) + 0.9), layout="constrained", facecolor="white")
    axes = figure.subplots(len(rows), 1, squeeze=False, height_ratios=rows)[:, 0]
    end_s = max((t.span_s for _, t in shown), default=0.0)
    by_stage = any(has_stages(t.events) for _, t in shown)
    for axis, (title, timeline) in zip(axes, shown, strict=False):
        _draw_timeline(axis, title, timeline, end_s, by_stage)
    if shown:
        _kind_legend(axes[0], [t for _, t in shown])
    if losses:
        _draw_loss(axes[-1], run.metrics, reference, beside)
    return _save(figure, path)


def step_picture(timeline: Timeline, path: Path, *, title: str) -> Path:
    """One step, a row a device."""
    figure = Figure(figsize=(10, 0.4 * len(timeline.devices) + 1.2), layout="constrained", facecolor="white")
    axis = figure.subplots()
    step = typical(timeline) or timeline
    _draw_timeline(axis, title, step, step.span_s, by_stage=False)
    kinds = {kind_key(kind): kind_name(kind) for kind in in_order({event.kind for event in step.events})}
    kinds |= {key: name for key, name in _BOTH_WAYS.items() if key in kinds}
    handles = [Patch(color=_colour(key), label=name) for key, name in kinds.items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False, fontsize=8)
    return _save(figure, path)


def ratio_picture(bars: Sequence[RatioBar], path: Path, *, title: str, unit: str = "×") -> Path:
    """A bar for each ratio with its spread, and a mark where the claim stands; a claim that is missed is drawn in red."""
    figure = Figure(figsize=(8, 0.5 * len(bars) + 1.2), layout="constrained", facecolor="white")
    axis = figure.subplots()
    _plain(axis, title)
    furthest = max([bar.high for bar in bars] + [bar.bar for bar in bars if bar.bar is not None], default=1.0)
    for place, bar in enumerate(bars):
        missed = bar.bar is not None and bar.value < bar.bar
        axis.barh(place, bar.value, height=0.56, color=LIGHT["c4" if missed else "c0"])
        axis.plot([bar.low, bar.high], [place, place], color=_TEXT, linewidth=1.5, solid_capstyle="butt")
        if bar.bar is not None:
            axis.plot(
                [bar.bar, bar.bar], [place - 0.38, place + 0.38], color=_TEXT, linewidth=1.5, linestyle=(0, (2, 1.5))
            )
        claim = f"   (claim {bar.bar:g}{unit})" if bar.bar is not None else ""
        right = max(bar.high, bar.bar or 0.0) + 0.015 * furthest
        axis.text(right, place, f"{bar.value:.2f}{unit}{claim}", va="center", color=_TEXT, fontsize=9)
    axis.set_yticks(range(len(bars)), [bar.name for bar in bars], fontsize=9, color=_TEXT)
    axis.set_ylim(len(bars) - 0.4, -0.6)
    axis.set_xlim(0, 1.3 * furthest)
    axis.grid(axis="x", color=_LINE, linewidth=0.8)
    return _save(figure, path)


def _draw_timeline(axis: Axes, title: str, timeline: Timeline, end_s: float, by_stage: bool) -> None:
    ranks = len(timeline.devices)
    _plain(axis, f"{title}: {format_seconds(timeline.span_s)} a step")
    for rank in range(ranks):
        axis.barh(rank, 1.005e3 * end_s, height=0.76, color=_TRACK, zorder=0.5)
    alike: dict[tuple[str, str], list[Event]] = {}
    for event in timeline.events:
        alike.setdefault((event.lane, event_key(event, by_stage=by_stage)), []).append(event)
    for (lane, key), chosen in sorted(alike.items()):
        offset, height = _COMM.get(key, (0.25, 0.2)) if lane == "comm" else (-0.13, 0.5)
        axis.barh(
            [e.rank + offset for e in chosen],
            [1e3 * e.seconds for e in chosen],
            left=[1e3 * e.start_s for e in chosen],
            height=height,
            color=_colour(key),
            edgecolor="white",
            linewidth=0.6 if ranks <= 16 and key not in _COMM else 0.0,
        )
    axis.axvline(1e3 * timeline.span_s, color=_TEXT, linewidth=1.2)
    axis.set_ylim(ranks - 0.5, -0.5)
    axis.set_xlim(0, 1.005e3 * end_s)
    if ranks <= 24:
        axis.set_yticks(range(ranks), [f"{rank}  {device}" for rank, device in enumerate(timeline.devices)], fontsize=9)
    axis.set_xlabel("ms", fontsize=9, color=_SOFT, labelpad=1)


def _kind_legend(axis: Axes, timelines: Sequence[Timeline]) -> None:
    entries = legend([event for timeline in timelines for event in timeline.events])
    handles = [Patch(color=_colour(key), label=name) for key, name in entries]
    place: dict[str, Any] = {
        "loc": "lower right",
        "bbox_to_anchor": (1.0, 1.0),
        "ncols": min(8, len(handles)),
        "frameon": False,
    }
    axis.legend(
        handles=handles, fontsize=9, handlelength=0.9, handleheight=0.9, labelcolor=_SOFT, borderaxespad=0.2, **place
    )


def _colour(key: str) -> str:
    return STAGE_COLOURS[key] if key in STAGE_COLOURS else LIGHT[key]


def _draw_loss(axis: Axes, metrics: Metrics, reference: Metrics | None, beside: str) -> None:
    _plain(axis, "loss")
    if reference is not None:
        _curve(axis, reference, beside, LIGHT["c2"], width=6.0, alpha=0.4, marker=12.0)
    _curve(axis, metrics, "this run", LIGHT["c0"], width=1.6, alpha=1.0, marker=5.0)
    axis.grid(color=_LINE, linewidth=0.8)
    axis.set_xlabel("step", fontsize=9, color=_SOFT)
    axis.legend(fontsize=9, frameon=False, labelcolor=_SOFT)


def _curve(axis: Axes, metrics: Metrics, name: str, colour: str, *, width: float, alpha: float, marker: float) -> None:
    points = [(float(s.step), s.loss) for s in metrics.steps if s.loss is not None]
    window = max(1, len(points) // 40)
    mean = smoothed(points, window)
    label = f"{name}, training (mean of {window} steps)" if window > 1 else f"{name}, training"
    axis.plot([x for x, _ in mean], [y for _, y in mean], color=colour, linewidth=width, alpha=alpha, label=label)
    if metrics.validations:
        steps, losses = [v.step for v in metrics.validations], [v.loss for v in metrics.validations]
        top = LIGHT["c1"] if alpha == 1 else colour
        style: dict[str, Any] = {"linestyle": "none", "marker": "o", "markersize": marker, "markeredgewidth": 0}
        axis.plot(steps, losses, color=top, alpha=alpha, label=f"{name}, validation", **style)


def _plain(axis: Axes, title: str) -> None:
    axis.set_title(title, loc="left", fontsize=11, color=_TEXT, fontweight="bold")
    axis.set_axisbelow(True)
    for side in axis.spines.values():
        side.set_visible(False)
    axis.tick_params(length=0, labelsize=9, labelcolor=_SOFT)


def _save(figure: Figure, path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    # No date inside, so that the same run gives the same picture.
    metadata = {"Date": None} if path.suffix == ".svg" else None
    figure.savefig(path, dpi=160, metadata=metadata)
    return path

"""A scaling study as a table, and as a picture of speed-up, efficiency, cost and energy against the ideal."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from heterodyne.report.palette import LIGHT, SERIES
from heterodyne.report.rows import Rows, columns
from heterodyne.report.study import KINDS, Cell, Figures, Seen, Study
from heterodyne.report.words import DASH, byte_size, change, digits, efficiency_text, ratio, seconds, unsteady
from heterodyne.units import counted

__all__ = ["study_picture", "study_rows"]

_TEXT, _LINE, _FAINT = "#1d2330", "#e3e5e9", "#a9afba"
_MANY = 1_000_000
"""Samples of which the price is shown."""
Value = Callable[[Cell, Figures], float | None]
Column = tuple[str, Callable[[Cell], str]]


def study_rows(study: Study) -> Rows:
    """Return a row for each cell; figures are measured, where they are. What is known of no cell has no column, and notes say what is
    lacking.
    """

    def of(words: Callable[[float | None], str], value: Value) -> Callable[[Cell], str]:
        return lambda cell: words(None if cell.figures is None else value(cell, cell.figures))

    table: list[Column] = [
        (">devices", lambda cell: str(cell.devices)),
        ("strategy", lambda cell: cell.strategy),
        (">step, predicted", lambda cell: seconds(cell.predicted.step_s if cell.predicted else None)),
        (">measured", lambda cell: seconds(cell.measured.step_s if cell.measured else None)),
        (">error", lambda cell: change(cell.error)),
        (">samples/s", of(digits, lambda _, own: own.samples_per_s)),
        (">speed-up", lambda cell: ratio(study.speed_up(cell))),
        (">over the best device", of(ratio, lambda _, own: own.samples_per_s / study.alone if study.alone else None)),
        (">efficiency", of(efficiency_text, lambda _, own: own.efficiency)),
        (">of the ideal", of(efficiency_text, Cell.of_ideal)),
        (">fullest device", of(byte_size, lambda _, own: own.memory_bytes)),
        (">usd/1M samples", of(digits, lambda cell, own: _times(_MANY / study.batch, cell.usd(own)))),
        (">J/step", of(digits, Cell.joules)),
        ("plan", lambda cell: f"none: {_in_a_line(cell.refused)}" if cell.refused else cell.plan),
    ]
    told = [(title, [cell(each) for each in study.cells]) for title, cell in table]
    told = [(title, cells) for title, cells in told if set(cells) - {DASH, ""}]
    return Rows(
        title=f"{study.name}: how it scales, {counted(study.batch, 'sample')} a step",
        columns=columns(*(title for title, _ in told)),
        rows=tuple(zip(*(cells for _, cells in told), strict=True)),
        notes=_notes(study),
    )


def _in_a_line(reason: str) -> str:
    """Return the first sentence of what a planner or a run says, which may list each device."""
    first, *more = (line.strip(" -") for line in reason.splitlines())
    return f"{first} {more[0]}" if first.endswith(":") and more else first


def _notes(study: Study) -> tuple[str, ...]:
    cells = [cell for cell in study.cells if cell.figures is not None]
    lacking = [
        "Efficiency is of what the devices reach each for itself with its own share, as plans have it; the ideal is what they reach at "
        "their best, whatever their shares."
    ]
    if any(cell.usd_per_hour is None for cell in cells):
        lacking.append(
            "The price of some devices is not known: write 'prices:' or 'usd_per_hour:' into the cluster file."
        )
    if any(cell.watts is None for cell in cells):
        lacking.append("The power of some devices is not known: write 'watts:' into the cluster file.")
    return tuple(lacking)


def study_picture(study: Study, path: Path) -> Path:
    """Draw curves over the number of devices, a colour for each strategy: what was measured is solid, what is predicted dashed. The file's
    suffix says what is written.

    The ideal is the sum of what the devices reach each for itself: for unlike devices it is no straight line. Speed-up is over the fastest
    device alone, or, where the model fits on none, over the smallest cell. Cost and energy have a place where any is known.
    """
    base = study.alone or next((own.samples_per_s for cell in _smallest_first(study) if (own := cell.figures)), 1.0)
    over = "the fastest device" if study.alone else "the smallest number of devices"
    panels: list[tuple[str, str, Value]] = [
        ("Speed-up", f"samples/s over those of {over}", lambda _, own: own.samples_per_s / base),
        (
            "Efficiency",
            "% of what all devices reach, each for itself",
            lambda cell, own: _steady(cell.of_ideal(own)),
        ),
        ("Cost", "usd for a million samples", lambda cell, own: _times(_MANY / study.batch, cell.usd(own))),
        ("Energy", "J a sample", lambda cell, own: _times(1 / study.batch, cell.joules(own))),
    ]
    shown = [panel for panel in panels if panel[0] == "Speed-up" or _curves(study, panel[2])]
    across = min(2, len(shown))
    down = -(-len(shown) // across)
    figure = Figure(figsize=(1.2 + 4.4 * across, 0.9 + 3.1 * down), layout="constrained", facecolor="white")
    places = figure.subplots(down, across, squeeze=False).flat
    for axis, (title, what, value) in zip(places, shown, strict=False):
        ideal = {
            "Speed-up": [(count, rate / base) for count, rate in study.ideal],
            "Efficiency": [(count, 100.0) for count, _ in study.ideal],
        }
        _draw(axis, study, value, ideal.get(title, []))
        axis.set_title(title, color=_TEXT, fontsize=11, loc="left")
        axis.set_ylabel(what, color=_TEXT, fontsize=8)
    for axis in list(places)[len(shown) :]:
        axis.set_axis_off()
    figure.legend(handles=_legend(study), loc="outside lower center", ncols=6, frameon=False, fontsize=8)
    figure.suptitle(f"{study.name}, {counted(study.batch, 'sample')} a step", color=_TEXT, fontsize=11)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=144)
    return path


def _draw(axis: Axes, study: Study, value: Value, ideal: Sequence[tuple[int, float]]) -> None:
    if ideal:
        axis.plot(*zip(*ideal, strict=True), color=_FAINT, marker="." if len(ideal) == 1 else "", zorder=1)
    for colour, kind, points in _curves(study, value):
        measured = kind == "measured"
        axis.plot(
            *zip(*points, strict=True),
            color=colour,
            linestyle="-" if measured else "--",
            marker="o",
            markersize=5,
            markerfacecolor=colour if measured else "white",
            linewidth=1.5,
            zorder=3 if measured else 2,
        )
    counts = sorted({cell.devices for cell in study.cells})
    axis.set_xticks(counts, [str(count) for count in counts])
    axis.set_xlim(0, 1.05 * counts[-1])
    axis.set_ylim(
        0, 1.08 * max(y for points in (ideal, *(own for *_, own in _curves(study, value))) for _, y in points)
    )
    axis.set_xlabel("devices", color=_TEXT, fontsize=8)
    axis.tick_params(labelsize=8, colors=_TEXT)
    axis.grid(color=_LINE, linewidth=0.5)


def _curves(study: Study, value: Value) -> list[tuple[str, Seen, list[tuple[int, float]]]]:
    """A colour, what the figures are, and the points, for each strategy of which a value is known."""
    found = []
    for number, strategy in enumerate(study.strategies):
        for kind in KINDS:
            points = [
                (cell.devices, v) for cell, own in study.of(strategy, kind) if (v := value(cell, own)) is not None
            ]
            if points:
                found.append((LIGHT[f"c{number % SERIES}"], kind, points))
    return found


def _legend(study: Study) -> Sequence[Line2D]:
    kinds = [kind for kind in KINDS if any(study.of(strategy, kind) for strategy in study.strategies)]
    return [
        *(
            Line2D([], [], color=LIGHT[f"c{number % SERIES}"], linewidth=3, label=strategy)
            for number, strategy in enumerate(study.strategies)
        ),
        *(Line2D([], [], color=_TEXT, linestyle="-" if kind == "measured" else "--", label=kind) for kind in kinds),
        Line2D([], [], color=_FAINT, label="ideal: no device ever waits"),
    ]


def _smallest_first(study: Study) -> list[Cell]:
    return sorted(study.cells, key=lambda cell: cell.devices)


def _steady(efficiency: float | None) -> float | None:
    """Return percents; None where devices were slower while they were measured than in the run."""
    return None if efficiency is None or unsteady(efficiency) else 100 * efficiency


def _times(factor: float, value: float | None) -> float | None:
    return None if value is None else factor * value

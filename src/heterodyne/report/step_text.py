"""One step as text: a row for each rank, time from left to right, as wide as there is room.

    0  here/cpu:0  F0=F1=F2=...B0=====B1=====B2=====STEP=
    1  here/cpu:1  ...F0=B0===F1=B1===F2=B2===......STEP=

Each action begins with as much of its name as fits, with the stage where its rank has several; ``=`` goes on with it, ``.`` is waiting.
What is shorter than a character is covered by what comes after it. On a terminal each stage has its colour, and the shade tells
forward from backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.text import Text

from heterodyne.printable import printable
from heterodyne.report.palette import LIGHT, STAGE_COLOURS, event_key, stage_of
from heterodyne.report.step_times import in_order
from heterodyne.report.words import kind_name
from heterodyne.timeline import Event, Timeline
from heterodyne.units import format_seconds

__all__ = ["StepText", "step_text"]

_LEAST_WIDTH = 24
_OF_THE_RANK = ("CLIP", "STEP")
_DARKEST_FOR_BLACK = 110.0  # luminance, 0 to 255


@dataclass(frozen=True, kw_only=True)
class StepText:
    """``rows``: the margin, then ``(text, colour)`` for each action or wait, colour "" for waiting. ``scale``: what a row spans.

    ``legend``: what the letters stand for.
    """

    title: str
    rows: tuple[tuple[str, tuple[tuple[str, str], ...]], ...]
    scale: str
    legend: str

    def text(self) -> str:
        """Without colour."""
        lines = [margin + "".join(part for part, _ in runs).rstrip() for margin, runs in self.rows]
        return "\n".join([self.title, *lines, self.scale, self.legend]) + "\n"

    def __rich__(self) -> Text:
        drawn = Text(no_wrap=True, overflow="crop")
        drawn.append(f"{self.title}\n", style="bold")
        for margin, runs in self.rows:
            drawn.append(margin)
            for part, colour in runs:
                plain = part.replace("=", " ").replace(".", " ")
                drawn.append(plain, style=f"{_ink(colour)} on {colour}" if colour else "")
            drawn.append("\n")
        drawn.append(f"{self.scale}\n{self.legend}", style="dim")
        return drawn


def step_text(timeline: Timeline, width: int, *, title: str = "One step") -> StepText:
    """The compute lane of each rank of one step (see `Timeline.of_step`), in about ``width`` characters, at least a few."""
    numbers = len(str(max(0, len(timeline.devices) - 1)))
    devices = [printable(device) for device in timeline.devices]
    names = max(map(len, devices), default=0)
    room = max(_LEAST_WIDTH, width - numbers - names - 4)
    span_s = timeline.span_s or 1.0
    rows = tuple(
        (f"{rank:>{numbers}}  {device:<{names}}  ", _row(_of_rank(timeline, rank), span_s, room))
        for rank, device in enumerate(devices)
    )
    return StepText(
        title=title,
        rows=rows,
        scale=f"{format_seconds(timeline.span_s)} from left to right; a character is {format_seconds(span_s / room)}",
        legend=_legend(timeline),
    )


def _legend(timeline: Timeline) -> str:
    """Return what the first letters stand for; kinds that share one stand together."""
    names: dict[str, list[str]] = {}
    for kind in in_order({event.kind for event in timeline.events if event.lane == "compute"}):
        names.setdefault(kind[:1], []).append(kind_name(kind))
    return ", ".join(f"{letter}: {' or '.join(of)}" for letter, of in {**names, ".": ["waiting"]}.items())


def _of_rank(timeline: Timeline, rank: int) -> list[Event]:
    return [event for event in timeline.events if event.rank == rank and event.lane == "compute"]


def _row(events: Sequence[Event], span_s: float, room: int) -> tuple[tuple[str, str], ...]:
    cells: list[Event | None] = [None] * room
    for event in events:
        first = min(room - 1, round(event.start_s / span_s * room))
        for cell in range(first, max(first + 1, min(room, round(event.end_s / span_s * room)))):
            cells[cell] = event
    several = len({stage_of(event.name) for event in events if event.kind not in _OF_THE_RANK}) > 1
    runs: list[tuple[str, str]] = []
    begin = 0
    for cell in range(1, room + 1):
        if cell == room or cells[cell] is not cells[begin]:
            here, length = cells[begin], cell - begin
            runs.append(("." * length, "") if here is None else (_label(here, length, several), _colour(here)))
            begin = cell
    return tuple(runs)


def _label(event: Event, room: int, with_stage: bool) -> str:
    """As much of the name as there is room for: ``0F12``, ``F12``, or ``F`` alone."""
    short = event.name.lstrip("0123456789")
    names = (event.name, short) if with_stage and event.kind not in _OF_THE_RANK else (short,)
    return next((name for name in names if len(name) <= room), event.kind[:1]).ljust(room, "=")


def _colour(event: Event) -> str:
    key = event_key(event, by_stage=True)
    return STAGE_COLOURS[key] if key in STAGE_COLOURS else LIGHT[key]


def _ink(colour: str) -> str:
    """Black or white, whichever can be read on it."""
    red, green, blue = (int(colour[at : at + 2], 16) for at in (1, 3, 5))
    return "#000000" if 0.299 * red + 0.587 * green + 0.114 * blue > _DARKEST_FOR_BLACK else "#ffffff"

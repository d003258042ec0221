"""A step drawn as text: every row is as wide as the others, and what stands in it is what ran, in order."""

from __future__ import annotations

import io
import re

from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from heterodyne.report.step_text import step_text
from heterodyne.report.tables import step_rows
from heterodyne.timeline import Event, Timeline


def event(rank: int, name: str, start_s: float, end_s: float) -> Event:
    kind = name.lstrip("0123456789").rstrip("0123456789")
    return Event(rank=rank, lane="compute", kind=kind, name=name, step=0, start_s=start_s, end_s=end_s)


def lines(timeline: Timeline, width: int) -> list[str]:
    return step_text(timeline, width).text().splitlines()[1 : 1 + len(timeline.devices)]


SMALL = Timeline.of(
    "simulated",
    ["a", "bb"],
    [
        event(0, "0F0", 0, 3),
        event(0, "0B0", 12, 18),
        event(0, "0STEP", 18, 24),
        event(1, "1F0", 3, 6),
        event(1, "1B0", 6, 12),
    ],
)


def test_the_letters_are_explained_and_the_parts_of_each_rank_told() -> None:
    assert step_text(SMALL, 31).text().endswith("\nF: forward, B: backward, S: optimizer step, .: waiting\n")
    table = step_rows(SMALL)
    assert [column.title for column in table.columns] == [
        "rank", "device", "forward", "backward", "optimizer step", "exposed communication", "idle"
    ]  # fmt: skip
    assert table.rows[0] == ("0", "a", "12.5 %", "25.0 %", "25.0 %", "0.0 %", "37.5 %")
    assert table.rows[1] == ("1", "bb", "12.5 %", "25.0 %", "0.0 %", "0.0 %", "62.5 %")


def test_places_are_times_and_waiting_is_dots() -> None:
    assert lines(SMALL, 31) == ["0  a   F0=.........B0====STEP==", "1  bb  ...F0=B0===="+ "." * 12]  # fmt: skip


def test_a_rank_of_several_stages_names_them_where_there_is_room() -> None:
    both = Timeline.of("simulated", ["a"], [event(0, "0F10", 0, 4), event(0, "3F0", 4, 6), event(0, "3B0", 6, 24)])
    (row,) = lines(both, 30)
    assert row == "0  a  0F10F03B0" + "=" * 15


@given(
    st.lists(st.tuples(st.sampled_from("FBIWR"), st.integers(0, 20), st.floats(0, 5)), min_size=1, max_size=30),
    st.integers(1, 200),
)
def test_any_step_fills_its_rows_and_keeps_the_order(drawn: list[tuple[str, int, float]], width: int) -> None:
    now, events = 0.0, []
    for kind, index, seconds in drawn:
        events.append(event(0, f"0{kind}{index}", now, now + seconds))
        now += seconds
    drawing = step_text(Timeline.of("simulated", ["x", "idle"], events), width)
    (margin, busy), (_, idle) = drawing.rows
    assert {sum(len(text) for text, _ in row) for row in (busy, idle)} == {max(24, width - len(margin))}
    assert all(colour == "" for _, colour in idle)
    shown = [text[0] for text, colour in busy if colour]
    kinds = iter(kind for kind, _, _ in drawn)
    assert all(letter in kinds for letter in shown), "what is shown is a part of what ran, in its order"


def test_a_terminal_sees_a_colour_for_each_stage_and_a_shade_for_each_pass() -> None:
    stream = io.StringIO()
    Console(file=stream, force_terminal=True, color_system="truecolor", width=60).print(step_text(SMALL, 60))
    assert len(set(re.findall(r"48;2;[0-9;]+", stream.getvalue()))) == 5, "F and B of two stages, and the update"


def test_a_timeline_without_events_is_drawn_as_waiting() -> None:
    assert set(lines(Timeline.of("simulated", ["a"], []), 40)[0][6:]) <= {"."}

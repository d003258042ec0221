"""Timelines: written and read back, also when the run was cut short."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from heterodyne.errors import HeterodyneError
from heterodyne.timeline import Event, Lane, Timeline


def event(rank: int = 0, start: float = 0.0, end: float = 1.0, lane: Lane = "compute", step: int = 0) -> Event:
    return Event(rank=rank, lane=lane, kind="F", name="0F0", step=step, start_s=start, end_s=end)


EVENTS = st.lists(
    st.builds(
        lambda rank, start, length, lane, step: event(rank, start, start + length, lane, step),
        st.integers(0, 2),
        st.floats(0, 100),
        st.floats(0, 10),
        st.sampled_from(["compute", "comm"]),
        st.integers(0, 2),
    ),
    max_size=12,
)


@pytest.mark.tour("timeline.py")
@given(EVENTS)
def test_saved_and_loaded_is_the_same(tmp_path_factory: pytest.TempPathFactory, events: list[Event]) -> None:
    path = tmp_path_factory.mktemp("timeline") / "timeline.jsonl"
    timeline = Timeline.of("measured", ["a", "b", "c"], events)
    timeline.save(path)
    assert Timeline.load(path) == timeline


@given(EVENTS)
def test_the_order_of_writing_does_not_matter(events: list[Event]) -> None:
    there, back = (Timeline.of("measured", "abc", e) for e in (events, events[::-1]))
    assert [(e.start_s, e.rank, e.lane) for e in there.events] == [(e.start_s, e.rank, e.lane) for e in back.events]


@given(EVENTS)
def test_busy_counts_overlap_once(events: list[Event]) -> None:
    timeline = Timeline.of("measured", "abc", events)
    for rank in range(3):
        mine = [e for e in events if e.rank == rank and e.lane == "compute"]
        assert timeline.busy_s(rank) <= sum(e.seconds for e in mine) + 1e-9
        if mine:
            assert timeline.busy_s(rank) >= max(e.seconds for e in mine) - 1e-9
            assert timeline.busy_s(rank) <= timeline.span_s + 1e-9


def test_a_file_that_was_cut_short_is_read_up_to_its_last_whole_line(tmp_path: Path) -> None:
    path = tmp_path / "timeline.jsonl"
    Timeline.of("measured", ["a"], [event(start=float(i), end=i + 1.0) for i in range(3)]).save(path)
    whole = path.read_text(encoding="utf-8")
    path.write_text(whole[:-20], encoding="utf-8")
    assert [e.start_s for e in Timeline.load(path).events] == [0.0, 1.0]
    lines = whole.splitlines()
    path.write_text("\n".join([lines[0], lines[1][:-9], lines[2]]) + "\n", encoding="utf-8")
    with pytest.raises(HeterodyneError, match=":2: not an event"):
        Timeline.load(path)


def test_what_has_no_header_is_no_timeline(tmp_path: Path) -> None:
    for text in ("", "{}\n", "[]\n", "no\n"):
        path = tmp_path / "x.jsonl"
        path.write_text(text, encoding="utf-8")
        with pytest.raises(HeterodyneError, match="not a timeline"):
            Timeline.load(path)


def test_a_step_counts_from_its_own_first_event() -> None:
    timeline = Timeline.of("measured", ["a"], [event(start=1.0, end=2.0), event(start=5.0, end=7.0, step=1)])
    (only,) = timeline.of_step(1).events
    assert (only.start_s, only.end_s) == (0.0, 2.0)
    assert timeline.of_step(9).events == ()
    assert timeline.of_step(9).span_s == 0.0
    assert timeline.span_s == 6.0


def test_perfetto_gets_a_process_a_rank_and_microseconds() -> None:
    trace = Timeline.of("simulated", ["a", "b"], [event(rank=1, start=0.5, end=2.0)]).to_perfetto()
    bars = [e for e in trace["traceEvents"] if e["ph"] == "X"]  # type: ignore[attr-defined]
    assert [(b["pid"], b["ts"], b["dur"]) for b in bars] == [(1, 5e5, 1.5e6)]

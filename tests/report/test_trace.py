"""The trace: valid trace-event JSON, with measured and predicted ranks as processes of their own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from heterodyne.report.perfetto import SIMULATED_PID, write_trace
from heterodyne.report.run import Run, load_run
from heterodyne.report.step_times import median_step
from report.synthetic_run import write_run


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return load_run(write_run(tmp_path_factory.mktemp("runs") / "traced", steps=10))


def events_of(run: Run, path: Path) -> list[dict[str, Any]]:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    content = json.loads(write_trace(run, path).read_text(encoding="utf-8"), parse_constant=refuse)
    events: list[dict[str, Any]] = content["traceEvents"]
    return events


def test_every_event_is_there_with_microseconds(run: Run, tmp_path: Path) -> None:
    events = events_of(run, tmp_path / "trace.json")
    assert run.measured is not None
    assert run.simulated is not None
    complete = [e for e in events if e["ph"] == "X"]
    assert len(complete) == len(run.measured.events) + len(run.simulated.events)
    assert all(
        e["dur"] >= 0 and e["ts"] >= 0 and isinstance(e["pid"], int) and isinstance(e["tid"], int) for e in complete
    )
    first = run.measured.events[0]
    match = [
        e
        for e in complete
        if e["pid"] == first.rank and e["name"] == first.name and e["ts"] == pytest.approx(first.start_s * 1e6)
    ]
    assert [e["dur"] for e in match] == [pytest.approx(first.seconds * 1e6)]


def test_both_groups_have_a_process_for_each_rank(run: Run, tmp_path: Path) -> None:
    names = {e["pid"]: e["args"]["name"] for e in events_of(run, tmp_path / "t.json") if e["name"] == "process_name"}
    assert set(names) == {*range(4), *(SIMULATED_PID + r for r in range(4))}
    assert names[1] == "measured · rank 1: laptop/cpu:1"
    assert names[SIMULATED_PID + 1] == "predicted · rank 1: laptop/cpu:1"


def test_the_prediction_stands_beside_a_typical_step(run: Run, tmp_path: Path) -> None:
    assert run.measured is not None
    step = median_step(run.measured)
    begin = min(e.start_s for e in run.measured.events if e.step == step)
    predicted = [e["ts"] for e in events_of(run, tmp_path / "t.json") if e["ph"] == "X" and e["pid"] >= SIMULATED_PID]
    assert min(predicted) == pytest.approx(begin * 1e6)


def test_a_run_without_timelines_has_an_empty_trace(tmp_path: Path) -> None:
    assert events_of(Run(directory=tmp_path), tmp_path / "t.json") == []

"""Reading run directories: whole, cut short, empty, and no run at all."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from heterodyne.errors import HeterodyneError
from heterodyne.report.run import Candidate, candidates_from, load_run, read_metrics
from report.synthetic_run import SHARES, write_run


def test_a_whole_run_misses_nothing(tmp_path: Path) -> None:
    run = load_run(write_run(tmp_path / "whole", steps=20))
    assert run.missing == ()
    assert run.name == "whole"
    assert tuple(run.samples.values()) == SHARES
    assert [s.step for s in run.metrics.steps] == list(range(1, 21))
    assert [v.step for v in run.metrics.validations] == [20]
    assert run.job is not None
    assert run.job.training.global_batch_size == 64
    assert run.speed_up_over_equal == pytest.approx(1 / 0.519)


@pytest.mark.parametrize(
    "name",
    [
        "job.yaml",
        "cluster.json",
        "plan.json",
        "candidates.json",
        "profile.json",
        "metrics.jsonl",
        "timeline-measured.jsonl",
        "timeline-simulated.jsonl",
        "summary.json",
    ],
)
@pytest.mark.parametrize("damage", ["missing", "empty", "cut", "garbage"])
def test_a_damaged_file_is_said_and_the_rest_is_read(tmp_path: Path, name: str, damage: str) -> None:
    directory = write_run(tmp_path / "run", steps=20)
    path = directory / name
    whole = path.read_bytes()
    if damage == "missing":
        path.unlink()
    else:
        path.write_bytes({"empty": b"", "cut": whole[: len(whole) * 2 // 3], "garbage": b"\xff\xfe\x00{[" * 9}[damage])
    run = load_run(directory)
    harmless = damage == "cut" and name in ("job.yaml", "timeline-measured.jsonl", "timeline-simulated.jsonl")
    assert harmless or any(sentence.startswith(name) for sentence in run.missing)
    others = {
        "metrics.jsonl": run.metrics.steps,
        "plan.json": run.plan,
        "timeline-measured.jsonl": run.measured,
        "profile.json": run.profile,
    }
    assert all(value for file, value in others.items() if file != name)


def test_a_line_that_was_cut_short_is_counted_and_left_out(tmp_path: Path) -> None:
    directory = write_run(tmp_path / "run", steps=20)
    path = directory / "metrics.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines()
    path.write_text("\n".join([*lines[:10], lines[10][:30]]), encoding="utf-8")
    run = load_run(directory)
    assert len(run.metrics.steps) == 10
    assert "metrics.jsonl: 1 line is cut short and left out." in run.missing


def test_of_a_step_that_was_trained_twice_the_last_counts(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    rows = [
        {"step": 1, "loss": 3.0},
        {"step": 2, "loss": 2.9},
        {"step": 2, "loss": 2.5},
        {"step": 2, "validation_loss": 2.6},
        {"step": 3, "loss": 2.0, "validation_loss": 2.1},
    ]
    path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    metrics = read_metrics(path)
    assert [(s.step, s.loss) for s in metrics.steps] == [(1, 3.0), (2, 2.5), (3, 2.0)]
    assert [(v.step, v.loss) for v in metrics.validations] == [(2, 2.6), (3, 2.1)]
    assert metrics.median("loss") == 2.5
    assert metrics.median("efficiency") is None
    assert read_metrics(tmp_path) == metrics


def test_a_directory_that_is_no_run_is_refused_with_what_was_looked_for(tmp_path: Path) -> None:
    with pytest.raises(HeterodyneError, match=r"looked in it for job\.yaml, plan\.json, metrics\.jsonl"):
        load_run(tmp_path)
    with pytest.raises(HeterodyneError, match="is not a directory"):
        load_run(tmp_path / "nowhere")
    write_run(tmp_path / "inner", steps=2)
    with pytest.raises(HeterodyneError, match="give one of them: inner"):
        load_run(tmp_path)
    with pytest.raises(HeterodyneError, match="cannot be read"):
        read_metrics(tmp_path / "nowhere.jsonl")


def test_candidates_come_as_plain_rows() -> None:
    rows = [
        {"name": "equal", "step_s": 2, "samples_per_s": 32, "chosen": False, "why": "slow"},
        {"name": "alone", "step_s": None},
    ]
    assert candidates_from(rows) == (
        Candidate(name="equal", step_s=2.0, samples_per_s=32.0, why="slow"),
        Candidate(name="alone"),
    )
    assert candidates_from([{"name": "never ends", "step_s": float("inf")}])[0].step_s is None


def test_without_a_summary_the_metrics_tell_the_memory_of_rank_0(tmp_path: Path) -> None:
    directory = write_run(tmp_path / "run", steps=2)
    (directory / "summary.json").unlink()
    rows = [{"step": 1, "loss": 3.0, "memory_bytes": 5e8}, {"step": 2, "loss": 2.9, "memory_bytes": 6e8}]
    (directory / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    assert load_run(directory).peak_memory == {"laptop/cpu:0": 6e8}


def test_peak_memory_may_be_told_in_order_of_rank(tmp_path: Path) -> None:
    directory = write_run(tmp_path / "run", steps=2)
    (directory / "summary.json").write_text(json.dumps({"peak_memory_bytes": [4, 3, 2, 1]}), encoding="utf-8")
    assert list(load_run(directory).peak_memory.values()) == [4, 3, 2, 1]

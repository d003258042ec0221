"""A run never writes over another."""

from __future__ import annotations

from pathlib import Path

import pytest

from heterodyne.errors import CheckpointError, HeterodyneError
from heterodyne.run_directory import RunDirectory


def test_runs_are_numbered_and_the_number_of_a_deleted_one_does_not_come_back_below_a_later_one(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    made = [RunDirectory.create_next(runs, "gpt").path.name for _ in range(3)]
    assert made == ["gpt-1", "gpt-2", "gpt-3"]
    (runs / "gpt-1").rmdir()
    (runs / "gpt-old-7").mkdir()
    assert RunDirectory.create_next(runs, "gpt").path.name == "gpt-4"
    assert RunDirectory.create_next(runs, "a job/ with spaces").path.name == "a-job-with-spaces-1"


def test_a_directory_that_holds_something_is_refused(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path / "run")
    RunDirectory.create(tmp_path / "run")
    run.metrics.touch()
    with pytest.raises(HeterodyneError, match=r"not empty \(it holds metrics\.jsonl\): continue .* --resume"):
        RunDirectory.create(tmp_path / "run")
    with pytest.raises(HeterodyneError, match="cannot be made"):
        RunDirectory.create(run.metrics)


def test_only_a_run_can_be_resumed(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="nothing to resume"):
        RunDirectory.existing(tmp_path / "nowhere")
    (tmp_path / "photos").mkdir()
    assert RunDirectory.existing(tmp_path / "photos").path == tmp_path / "photos", "killed before it wrote anything"
    (tmp_path / "photos" / "cat.jpg").touch()
    with pytest.raises(CheckpointError, match="photos is no run directory"):
        RunDirectory.existing(tmp_path / "photos")
    with pytest.raises(CheckpointError, match="no run gpt-N"):
        RunDirectory.latest(tmp_path, "gpt")
    for number in (2, 10):
        (tmp_path / f"gpt-{number}" / "checkpoint").mkdir(parents=True)
    assert RunDirectory.latest(tmp_path, "gpt").path.name == "gpt-10"


def test_a_run_that_had_checkpoints_does_not_begin_anew_without_them(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    run.require_unbegun()
    run.checkpoints.symlink_to(tmp_path / "unmounted")
    with pytest.raises(CheckpointError, match=r"leads to .*unmounted, which is not there: mount the disk"):
        run.require_unbegun()
    run.checkpoints.unlink()
    run.summary.write_text("{}")
    with pytest.raises(CheckpointError, match=r"has ended .*its checkpoints are gone"):
        run.require_unbegun()

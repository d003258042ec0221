"""The job file: sections, overrides, and what its fingerprint depends on."""

from __future__ import annotations

from pathlib import Path

import pytest

from heterodyne.errors import JobError
from heterodyne.job import Job, decisive

TEXT = """\
model:
  factory: models:gpt
  arguments: {width: 64}
training:
  steps: 20
  global_batch_size: 16
parallelism:
  bucket_size: 1 MiB
"""


def job(tmp_path: Path, *overrides: str, text: str = TEXT) -> Job:
    path = tmp_path / "job.yaml"
    path.write_text(text, encoding="utf-8")
    return Job.load(path, overrides)


def test_what_is_not_said_has_a_default(tmp_path: Path) -> None:
    read = job(tmp_path)
    assert (read.training.steps, read.optimizer.name, read.parallelism.bucket_size) == (20, "adamw", 2**20)


def test_relative_paths_start_beside_the_file_unless_it_says_where(tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    assert job(tmp_path).base(file) == tmp_path
    moved = job(tmp_path, text=TEXT + "relative_to: /elsewhere\n")
    assert moved.base(file) == Path("/elsewhere")
    assert moved.fingerprint == job(tmp_path).fingerprint


def test_overrides_reach_any_depth_and_are_typed(tmp_path: Path) -> None:
    read = job(
        tmp_path,
        "training.steps=50",
        "model.arguments.width=128",
        "optimizer.lr=0.1",
        "parallelism.micro_batch_sizes=[2, 4]",
    )
    assert (read.training.steps, read.model.arguments, read.optimizer.lr) == (50, {"width": 128}, 0.1)
    assert read.parallelism.micro_batch_sizes == (2, 4)


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("training.steps", "write section.field=value"),
        ("steps=3", "write section.field=value"),
        ("training.step=3", "did you mean 'steps'?"),
        ("training.steps.more=3", "'steps' is not a section"),
        ("training.steps=0", "greater than or equal to 1"),
        ("training.steps={", "not a YAML value"),
        ("trainig.steps=3", "did you mean 'training'?"),
    ],
)
def test_a_wrong_override_is_refused(tmp_path: Path, override: str, says: str) -> None:
    with pytest.raises(JobError) as caught:
        job(tmp_path, override)
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("line", "text", "says"),
    [
        (9, TEXT + "data: {text: stdlib, sequence: 3}\n", "did you mean 'sequence_length'?"),
        (8, TEXT.replace("1 MiB", "1 MX"), "has no unit that a size can have"),
        (1, "model: {}\n", "exactly one of factory, huggingface, directory (given: none)"),
        (1, "model: {factory: a:b, directory: c}\n", "given: factory, directory"),
        (1, "model: {directory: c, arguments: {a: 1}}\n", "arguments go with factory"),
        (1, "- 1\n", "a job is a mapping"),
        (9, TEXT + "model: {factory: a:b}\n", "given twice (first on line 1)"),
        (9, TEXT + "optimizer: {lr: fast}\n", "optimizer.lr"),
        (7, TEXT + "  async: predicted\n", "training.clip_grad_norm: 0"),
        (7, TEXT + "  async: predicted\noptimizer: {name: adafactor}\n", "which adafactor lacks"),
        (7, TEXT + "  async: predicted\n  strategy: data\n", "async goes with strategy pipeline, not with data"),
        (9, TEXT + "  async: sometimes\n", "Input should be 'predicted'"),
    ],
)
def test_a_wrong_file_names_its_line(tmp_path: Path, line: int, text: str, says: str) -> None:
    with pytest.raises(JobError) as caught:
        job(tmp_path, text=text)
    assert says in str(caught.value)
    assert caught.value.line == line


def test_the_fingerprint_is_of_what_decides_the_losses(tmp_path: Path) -> None:
    base = job(tmp_path).fingerprint
    for same in (
        "parallelism.strategy=equal", "checkpoint.every=3", "metrics.every=2", "model.loss_count=samples", "data.cache=elsewhere",
        "training.validate_every=3", "training.validation_samples=1", "optimizer.schedule_steps=20",
    ):  # fmt: skip
        assert job(tmp_path, same).fingerprint == base
    for other in ("training.seed=1", "optimizer.lr=0.5", "data.sequence_length=64", "model.arguments.width=65"):
        assert job(tmp_path, other).fingerprint != base


def test_more_steps_are_another_job_only_where_they_change_the_schedule(tmp_path: Path) -> None:
    constant = "optimizer.schedule=constant"
    assert job(tmp_path, constant, "training.steps=99").fingerprint == job(tmp_path, constant).fingerprint
    assert job(tmp_path, "training.steps=99").fingerprint != job(tmp_path).fingerprint
    longer = job(tmp_path, "training.steps=99", "optimizer.schedule_steps=20")
    assert longer.fingerprint == job(tmp_path).fingerprint
    assert (longer.schedule_steps, job(tmp_path).schedule_steps) == (20, 20)


def test_a_run_that_is_extended_keeps_the_schedule_that_it_recorded(tmp_path: Path) -> None:
    before, after = job(tmp_path), job(tmp_path, "training.steps=99")
    old_release = before.model_dump(mode="json", exclude={"parallelism", "checkpoint", "metrics"})
    del old_release["optimizer"]["schedule_steps"]
    for recorded in (before.decisive, old_release):
        assert decisive(recorded) == before.decisive
        assert after.continuing(recorded).decisive == before.decisive
    wanted = job(tmp_path, "training.steps=99", "optimizer.schedule_steps=50")
    assert wanted.continuing(before.decisive) == wanted

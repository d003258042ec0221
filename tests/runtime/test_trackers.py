"""Trackers of every bad kind: the training never waits for them, and people are told once."""

from __future__ import annotations

import importlib
import json
import resource
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from heterodyne.errors import HeterodyneError, JobError
from heterodyne.job import Job
from heterodyne.runtime.records.metrics import MetricsFile, StepRecord, Validation, tracked
from heterodyne.runtime.records.trackers.trackers import Trackers

BAD_TRACKERS = '''
import json, os, threading, time

def hang():
    print("hanging", flush=True)
    threading.Event().wait()

class Tracker:
    """Writes what it gets into FILE, if it is given one; fails as it is asked to."""

    def __init__(self, opening):
        self.options = opening.options
        self.place = self.options.get("place", "")
        if self.options.get("hangs") == "init":
            hang()
        if self.options.get("exits"):
            raise SystemExit("no key")
        time.sleep(self.options.get("sleeps_s", 0))

    def write(self, records):
        for record in records:
            if record.step == self.options.get("raises_at"):
                raise RuntimeError("no more")
            if record.step == self.options.get("hangs"):
                hang()
            if record.step == self.options.get("killed_at"):
                os.kill(os.getpid(), 9)
            if record.step == self.options.get("full_at"):
                with open("/dev/full", "w") as disk:
                    disk.write("x")
            if "file" in self.options:
                with open(self.options["file"], "a") as file:
                    file.write(json.dumps([record.step, record.values]) + "\\n")

    def close(self):
        print("what a library prints")
        if self.options.get("hangs") == "close":
            hang()
        if "file" in self.options:
            with open(self.options["file"], "a") as file:
                file.write("closed\\n")
'''

SOON_S, AMPLE_S = 0.2, 60.0


@pytest.fixture
def factory(tmp_path: Path) -> str:
    (tmp_path / "bad.py").write_text(BAD_TRACKERS)
    return f"{tmp_path / 'bad.py'}:Tracker"


def custom(factory: str, **arguments: Any) -> Mapping[str, Any]:
    return {"custom": {"factory": factory, "arguments": arguments}}


def after(wanted: Mapping[str, Any], run: Path, *, flush_s: float, steps: int = 20) -> list[str]:
    """What is said of a tracker in a run of so many steps. That this returns shows that no write waits."""
    said: list[str] = []
    with Trackers([wanted], run, flush_s=flush_s, say=said.append) as trackers:
        for step in range(1, steps + 1):
            trackers.write(step, {"loss": 1 / step})
    return said


def test_records_come_whole_and_in_order_and_the_tracker_is_closed(tmp_path: Path, factory: str) -> None:
    got = tmp_path / "got"
    said = after(custom(factory, file=str(got), place="over there"), tmp_path / "run", flush_s=AMPLE_S, steps=3000)
    *lines, last = got.read_text().splitlines()
    assert [json.loads(line) for line in lines] == [[step, {"loss": 1 / step}] for step in range(1, 3001)]
    assert last == "closed"
    assert said == ["custom: over there"]
    assert (tmp_path / "run/logs/tracker-custom.log").read_text() == "what a library prints\n"


@pytest.mark.parametrize("where", ["init", 7])
def test_one_that_hangs_is_ended_after_the_run_with_one_warning(tmp_path: Path, factory: str, where: str | int) -> None:
    """The run goes on for as long as it takes the tracker to hang, and ends while it does."""
    said: list[str] = []
    step = 0
    with Trackers([custom(factory, hangs=where)], tmp_path, flush_s=SOON_S, say=said.append) as trackers:
        while "hanging" not in (tmp_path / "logs/tracker-custom.log").read_text():
            step += 1
            trackers.write(step, {"loss": 1 / step})
            time.sleep(0.01)
        trackers.write(step + 1, {"loss": 1.0})
    (warning,) = said
    assert warning.startswith(
        "warning: tracker custom had not finished 0.2 s after the end of the run, and was ended; it lacks "
    )


def test_one_that_hangs_while_it_is_closed_is_ended_with_one_warning(tmp_path: Path, factory: str) -> None:
    (warning,) = after(custom(factory, hangs="close"), tmp_path, flush_s=1.0)
    assert warning.startswith("warning: tracker custom had not finished 1 s ")


def test_one_that_raises_is_off_with_one_warning(tmp_path: Path, factory: str) -> None:
    got = tmp_path / "got"
    (said,) = after(custom(factory, file=str(got), raises_at=7), tmp_path, flush_s=AMPLE_S)
    assert said.startswith("warning: tracker custom failed (RuntimeError: no more): see its factory; see ")
    assert [json.loads(line)[0] for line in got.read_text().splitlines()] == [1, 2, 3, 4, 5, 6]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
def test_one_without_disk_says_to_make_room(tmp_path: Path, factory: str) -> None:
    (said,) = after(custom(factory, full_at=7), tmp_path, flush_s=AMPLE_S)
    assert said.startswith("warning: tracker custom failed (OSError: [Errno 28] No space left on device): make room")


def test_one_that_exits_or_cannot_be_imported_is_off_with_one_warning(tmp_path: Path, factory: str) -> None:
    (said,) = after(custom(factory, exits=True), tmp_path, flush_s=AMPLE_S)
    assert "failed (SystemExit: no key)" in said
    (said,) = after(custom("no_such_module:Tracker"), tmp_path, flush_s=AMPLE_S)
    assert "failed (ModuleNotFoundError: No module named 'no_such_module')" in said


def test_nothing_is_dropped_while_a_tracker_hangs_and_what_it_lacks_is_counted(tmp_path: Path, factory: str) -> None:
    """More than a pipe takes, and the tracker takes none."""
    (said,) = after(custom(factory, hangs="init"), tmp_path, flush_s=SOON_S, steps=5000)
    assert said == (
        "warning: tracker custom had not finished 0.2 s after the end of the run, and was ended; it lacks 5000 of 5000 records"
    )


def test_one_that_was_slow_gets_all_that_has_come_meanwhile(tmp_path: Path, factory: str) -> None:
    got = tmp_path / "got"
    assert after(custom(factory, file=str(got), sleeps_s=1.0), tmp_path, flush_s=AMPLE_S, steps=20_000) == []
    assert [json.loads(line)[0] for line in got.read_text().splitlines()[:-1]] == list(range(1, 20_001))


def test_people_hear_of_one_that_hangs_while_the_run_goes_on(
    tmp_path: Path, factory: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("heterodyne.runtime.records.trackers.handle._PATIENCE_S", 1.0)
    said: list[str] = []
    step = 0
    with Trackers([custom(factory, hangs="init")], tmp_path, flush_s=SOON_S, say=said.append) as trackers:
        while not said:
            step += 1
            trackers.write(step, {})
            time.sleep(0.05)
        trackers.write(step + 1, {})
    assert said == [
        "warning: tracker custom has taken nothing for 1 s; training goes on",
        "tracker custom had not finished 0.2 s after the end of the run, and was ended; "
        f"it lacks {step + 1} of {step + 1} records",
    ]


def test_one_whose_process_is_killed_is_off_with_one_warning(tmp_path: Path, factory: str) -> None:
    (said,) = after(custom(factory, killed_at=7), tmp_path, flush_s=AMPLE_S)
    assert said.startswith("warning: tracker custom ended by signal 9; see ")


def test_a_full_disk_costs_trackers_records_and_one_warning(tmp_path: Path, factory: str) -> None:
    got, said = tmp_path / "got", []
    with Trackers([custom(factory, file=str(got))], tmp_path, flush_s=AMPLE_S, say=said.append) as trackers:
        trackers.write(1, {"loss": 1.0})
        with full_disk_beyond(10):
            trackers.write(2, {"loss": 1.0})
            trackers.write(3, {"loss": 1.0})
        trackers.write(4, {"loss": 1.0})
    assert [json.loads(line)[0] for line in got.read_text().splitlines()[:-1]] == [1, 4]
    (warning,) = said
    assert warning.startswith(f"warning: {tmp_path / 'logs'} cannot be written (")


@pytest.mark.parametrize("where", ["init", "close"])
def test_a_process_with_a_tracker_that_hangs_comes_to_its_end(tmp_path: Path, factory: str, where: str) -> None:
    script = f"""
from heterodyne.runtime.records.trackers.trackers import Trackers
trackers = Trackers([{custom(factory, hangs=where)!r}], {str(tmp_path)!r}, flush_s={SOON_S})
trackers.write(1, {{"loss": 1.0}})
if {where == "close"}:  # also where nobody closes it
    trackers.close()
"""
    done = subprocess.run([sys.executable, "-c", script], timeout=120, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_what_was_written_before_the_training_was_killed_is_tracked(tmp_path: Path, factory: str) -> None:
    got = tmp_path / "got"
    script = f"""
import os
from heterodyne.runtime.records.trackers.trackers import Trackers
trackers = Trackers([{custom(factory, file=str(got))!r}], {str(tmp_path)!r}, flush_s={AMPLE_S})
for step in range(20):
    trackers.write(step, {{"loss": 1.0}})
os.kill(os.getpid(), 9)
"""
    subprocess.run([sys.executable, "-c", script], timeout=120, check=False)
    log = tmp_path / "logs" / "tracker-custom.log"
    for _ in range(600):  # the tracker's own process prints this last
        if log.read_text():
            break
        time.sleep(0.1)
    assert [json.loads(line)[0] for line in got.read_text().splitlines() if line != "closed"] == list(range(20))


def test_what_is_no_number_is_left_out_with_one_warning(tmp_path: Path, factory: str) -> None:
    got, said = tmp_path / "got", []
    with Trackers([custom(factory, file=str(got))], tmp_path, flush_s=AMPLE_S, say=said.append) as trackers:
        trackers.write(1, {"loss": "low", "lr": None, "n": 2})
        trackers.write(2, {"loss": "lower", "n": 3})
    assert got.read_text().splitlines()[:2] == ['[1, {"n": 2.0}]', '[2, {"n": 3.0}]']
    assert said == ["warning: trackers take numbers, and 'loss' is a str: it is left out"]


@pytest.mark.tour("runtime/records/trackers/")
def test_a_package_that_is_missing_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    said: list[str] = []
    Trackers(["tensorboard"], tmp_path, say=said.append).close()
    assert said == ["no tensorboard records: it is not installed (pip install 'heterodyne[tensorboard]')"]


def test_a_directory_named_like_a_package_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "trackio").mkdir()  # as W&B leaves one of its name in the working directory
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    importlib.invalidate_caches()
    said: list[str] = []
    Trackers([{"trackio": {"project": "p"}}], tmp_path, say=said.append).close()
    assert "not installed" in said[0]


@pytest.mark.parametrize(
    ("trackers", "told"),
    [
        ("[wandbb]", r"metrics\.trackers\.0\.wandbb: there is no such key; did you mean 'wandb'"),
        ("[{wandb: {projekt: x}}]", r"projekt: there is no such key; did you mean 'project'"),
        ("[{wandb: {mode: later}}]", r"wandb\.mode: Input should be 'online', 'offline' or 'disabled'"),
        ("[{trackio: {}}]", r"trackio\.project: is missing"),
        ("[{wandb: {}, mlflow: {}}]", r"is one tracker .*given: wandb, mlflow"),
        ("[wandb, {wandb: {}}]", r"wandb is given twice"),
        ("[{custom: {factory: mine}}]", r"custom\.factory"),
    ],
)
def test_a_job_is_told_what_is_wrong_with_its_trackers(tmp_path: Path, trackers: str, told: str) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(f"model: {{factory: 'm:f'}}\nmetrics:\n  trackers: {trackers}\n")
    with pytest.raises(JobError, match=told) as raised:
        Job.load(path)
    assert ":3:" in str(raised.value)


def test_tensorboard_is_the_default_and_is_there_once() -> None:
    def wanted(**metrics: Any) -> list[str]:
        job = Job.model_validate({"model": {"factory": "m:f"}, "metrics": metrics})
        assert Job.model_validate(job.model_dump(mode="json", exclude_none=True)) == job
        return [each.name for each in job.metrics.wanted]

    assert (
        wanted()
        == wanted(trackers=["tensorboard"])
        == wanted(tensorboard=False, trackers=["tensorboard"])
        == ["tensorboard"]
    )
    assert wanted(tensorboard=False) == []
    assert wanted(trackers=[{"wandb": None}, "mlflow"]) == ["tensorboard", "wandb", "mlflow"]


def record(step: int) -> StepRecord:
    return StepRecord(
        step=step, loss=5.0 / step, grad_norm=1.0, lr=1e-3, step_s=0.5, samples_per_s=64.0, tokens_per_s=None, efficiency=0.9,
        memory_bytes=10**9, time_s=1e9 + step,
    )  # fmt: skip


def test_tensorboard_gets_the_numbers_of_a_run_and_forgets_another_past(tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    for done in (0, 2):  # killed after 3 steps, resumed from 2
        said: list[str] = []
        with Trackers(["tensorboard"], tmp_path, done=done, flush_s=AMPLE_S, say=said.append) as trackers:
            for step in range(done + 1, done + 4):
                trackers.write(step, tracked(record(step)), time_s=record(step).time_s)
            trackers.write(5, tracked(Validation(step=5, validation_loss=2.0, time_s=0.0)))
        assert said == []
    events = accumulator.EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [event.step for event in events.Scalars("train/loss")] == [1, 2, 3, 4, 5]
    assert [event.value for event in events.Scalars("train/loss")] == pytest.approx([5.0 / n for n in range(1, 6)])
    assert [event.wall_time for event in events.Scalars("train/loss")] == [1e9 + n for n in range(1, 6)]
    assert events.Scalars("validation/loss")[-1].value == 2.0
    assert "train/efficiency" in events.Tags()["scalars"]


@pytest.mark.parametrize(
    ("package", "options"),
    [
        ("wandb", {"project": "p", "mode": "offline"}),
        ("mlflow", {"tracking_uri": "sqlite:///RUN/mlflow.db"}),
        ("trackio", {"project": "p"}),
    ],
)
def test_the_real_ones_take_a_run_and_its_resume(
    package: str, options: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip(package)
    monkeypatch.setenv("HOME", str(tmp_path))
    given = {name: value.replace("RUN", str(tmp_path)) for name, value in options.items()}
    kept = set()
    for done in (0, 3):
        said: list[str] = []
        with Trackers(
            [{package: given}], tmp_path / "run", done=done, config={"training": {"steps": 6}}, say=said.append
        ) as t:
            for step in range(done + 1, done + 4):
                t.write(step, {"train/loss": 1 / step})
        assert not [line for line in said if "warning" in line], said
        kept.add((tmp_path / f"run/logs/tracker-{package}.id").read_text())
    assert len(kept) == 1, "one run for the tracker too"


@contextmanager
def full_disk_beyond(size: int) -> Iterator[None]:
    """No file may grow beyond so many bytes: what the system says is EFBIG, and it writes what fits, as with a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_costs_lines_of_the_metrics_and_one_warning(tmp_path: Path) -> None:
    path, said = tmp_path / "metrics.jsonl", []
    file = MetricsFile(path, say=said.append)
    file.write(record(1))
    with full_disk_beyond(path.stat().st_size + 10):
        file.write(record(2))
        file.write(record(3))
    file.write(record(4))
    file.close()
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 4]
    (warning,) = said
    assert warning.startswith(f"warning: {path} cannot be written (")
    assert "training goes on" in warning


def test_a_directory_that_cannot_be_made_is_an_error_before_the_run(tmp_path: Path, factory: str) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(HeterodyneError, match="cannot be made"):
        Trackers([custom(factory)], tmp_path / "file")

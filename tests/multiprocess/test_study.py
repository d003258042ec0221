"""A scaling study of cells that are trained, each in processes of its own; and a command beside this process that ends with it."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from heterodyne.report.study import Study
from multiprocess.cli_job import CLUSTER, Place, make_place

SETS = ("--set", "parallelism.measure_s=1", "--set", "parallelism.check_s=0")
STUDY = ("study", "job.yaml", "--run", "--devices", "1,2", "--steps", "4", *SETS)
EMULATED = ("--cluster", "two.yaml", "--speeds", "0.5,0.5")
PATIENCE_S = 180.0


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    made = make_place(tmp_path_factory.mktemp("study"))
    (made.path / "two.yaml").write_text(CLUSTER.replace("name: two\n", "name: two\nprices: {cpu: 0.36}\n"))
    (made.path / "ends.py").write_text("import os\n\ndef build():\n    os._exit(3)\n")
    return made


def wait_for(path: Path) -> None:
    until = time.monotonic() + PATIENCE_S
    while not path.exists():
        assert time.monotonic() < until, f"{path} did not come"
        time.sleep(0.02)


def left_behind(folder: Path) -> list[list[str]]:
    found = psutil.process_iter(["cwd", "cmdline"])
    return [process.info["cmdline"] for process in found if process.info["cwd"] == str(folder)]


def test_cells_are_trained_and_a_study_that_is_stopped_goes_on(place: Place) -> None:
    status, said = place.run(*STUDY, *EMULATED, "--plans", "data")
    assert status == 0, said
    study = Study.load(place.path / "study.json")
    assert [(cell.devices, cell.strategy, cell.origin) for cell in study.cells] == [
        (1, "data", "run"),
        (2, "data", "run"),
    ]
    for cell in study.cells:
        assert cell.predicted is not None
        assert cell.measured is not None
        assert cell.error is not None
        assert cell.bound_samples_per_s
        # 0.36 usd/h are 1e-4 usd/s for each device that takes part; what a core draws nobody says.
        devices = round((cell.usd(cell.measured) or 0) / cell.measured.step_s / 1e-4)
        assert 1 <= devices <= cell.devices
        assert cell.joules(cell.measured) is None
        run = place.path / "study.runs" / f"{cell.devices}-data"
        assert (run / "report.html").exists()
        assert not (run / "model").exists(), "nobody wants the weights of so few steps"
    assert "The power of some devices is not known" in said

    measured = ("--profile", "study.runs/2-data/profile.json", "--cluster", "two.yaml", "--out", "paper.json")
    status, said = place.run("study", "job.yaml", "--devices", "1,2", "--plans", "data", *measured)
    assert status == 0, said
    for paper, run in zip(Study.load(place.path / "paper.json").cells, study.cells, strict=True):
        assert (paper.devices, paper.origin, paper.measured) == (run.devices, "profile", None)
        assert paper.predicted is not None

    process = place.start(*STUDY, *EMULATED, "--plans", "data,equal")
    wait_for(place.path / "study.runs" / "1-equal")
    process.send_signal(signal.SIGINT)
    said, _ = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 130, said
    assert "has the 2 cells that are done: the same command goes on" in said
    assert "Traceback" not in said
    assert Study.load(place.path / "study.json") == study
    assert left_behind(place.path) == []


def test_a_cell_that_is_refused_ends_nothing_and_one_that_fails_is_tried_again(place: Place) -> None:
    alone = ("study", "job.yaml", "--run", "--devices", "1", "--steps", "4", *SETS)
    status, said = place.run(*alone, "--plans", "split", "--out", "refused.json")
    assert status == 0, said
    (cell,) = Study.load(place.path / "refused.json").cells
    assert cell.refused.startswith("no plan with strategy 'split'")
    assert cell.refused in said
    status, said = place.run(*alone, "--plans", "data", "--set", "model.factory=ends.py:build", "--out", "failed.json")
    assert status == 2, said
    assert (
        "runs have failed, and the same command tries them again:\n  1 device, data: its run ended with exit status 3"
        in said
    )
    assert not (place.path / "failed.json").exists()


def test_a_command_dies_with_who_has_started_it(tmp_path: Path) -> None:
    """Even if that one is killed, and with what the command has started itself."""
    inner = "import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)']); time.sleep(60)"
    outer = (
        "import sys; from pathlib import Path; from heterodyne.processes.command import run_logged;"
        f"run_logged((sys.executable, '-c', {inner!r}), Path('log'))"
    )
    process = subprocess.Popen([sys.executable, "-c", outer], cwd=tmp_path)
    until = time.monotonic() + PATIENCE_S
    while sum("time.sleep(60)" in " ".join(words[:3]) for words in left_behind(tmp_path)) < 3:
        assert time.monotonic() < until
        time.sleep(0.02)
    process.kill()
    process.wait()
    while left_behind(tmp_path):
        assert time.monotonic() < until
        time.sleep(0.02)

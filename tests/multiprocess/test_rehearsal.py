"""A rehearsal in real processes: it is told, and leaves no trace in the run that follows."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from multiprocess.cli_job import Place, make_place

SETTINGS = (
    "parallelism.strategy=pipeline",
    "parallelism.micro_batch_sizes=[2, 4]",
    "training.steps=6",
    "training.validate_every=0",
    "parallelism.measure_s=20",  # the links too, also on a busy machine
    "parallelism.rehearsal_s=5",
    "checkpoint.every=0",
)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    return make_place(tmp_path_factory.mktemp("rehearsal"))


def trained(place: Place, name: str, *more: str, change: str = "") -> tuple[dict[tuple[int, str], float], str]:
    changes = [word for setting in (*SETTINGS, *change.split()) for word in ("--set", setting)]
    status, said = place.run_on(2, "train", "job.yaml", "--cluster", "two.yaml", "--run-dir", name, *changes, *more)
    assert status == 0, said
    return place.losses(name), said


def test_a_rehearsed_run_is_that_of_its_plan_bit_by_bit(place: Place) -> None:
    for attempt in range(5):  # on a busy machine two ways may be measured too far apart to be worth a rehearsal
        name = f"rehearsed-{attempt}"
        rehearsed, said = trained(place, name)
        if "rehearsing" in said:
            break
        shutil.rmtree(place.path / "home")  # the profile
    assert "rehearsing" in said
    assert "In rehearsal it took" in " ".join(said.split())
    again, said = trained(place, "given", "--plan", str(Path(name) / "plan.json"))
    assert "rehearsing" not in said
    assert again == rehearsed
    candidates = json.loads((place.path / name / "candidates.json").read_text())
    assert sum("in rehearsal" in candidate["why"] for candidate in candidates) > 1

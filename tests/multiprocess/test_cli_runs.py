"""The command line end to end, in real processes: trained, disturbed in every way, resumed, proved."""

from __future__ import annotations

import json
import random
import shutil
import signal
from pathlib import Path

import psutil
import pytest
from safetensors.torch import load_file

from heterodyne.cli import main
from multiprocess.cli_job import HETERODYNE, Place, make_place, worker

TRAIN = ("train", "job.yaml", "--cluster", "two.yaml")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    return make_place(tmp_path_factory.mktemp("cli"))


@pytest.fixture(scope="module")
def undisturbed(place: Place) -> dict[tuple[int, str], float]:
    """The losses of a run that nobody disturbed; its plan is ``undisturbed/plan.json``."""
    status, said = place.run_on(2, *TRAIN, "--run-dir", "undisturbed")
    assert status == 0, said
    return place.losses("undisturbed")


def shares(place: Place, name: str, *micro_batches: str) -> str:
    """The plan of the undisturbed run, edited by hand to other shares."""
    plan = json.loads((place.path / "undisturbed" / "plan.json").read_text())
    for pipeline, share in zip(plan["pipelines"], micro_batches, strict=True):
        pipeline["micro_batches"] = share
    (place.path / name).write_text(json.dumps(plan))
    return name


def assert_nobody_is_left(place: Place) -> None:
    for process in psutil.process_iter(["cwd", "cmdline"]):
        assert process.info["cwd"] != str(place.path), process.info["cmdline"]


def test_a_run_leaves_all_that_it_promises(place: Place, undisturbed: dict[tuple[int, str], float]) -> None:
    run = place.path / "undisturbed"
    promised = "job.yaml cluster.json profile.json candidates.json plan.json metrics.jsonl timeline-measured.jsonl summary.json"
    assert {*promised.split(), "report.html", "trace.json", "model", "checkpoint"} <= {p.name for p in run.iterdir()}
    assert [step for step, kind in undisturbed if kind == "loss"] == list(range(1, 101))
    assert undisturbed[100, "validation_loss"] < 0.8 * undisturbed[1, "loss"]
    assert "head.weight" in load_file(run / "model" / "model.safetensors")
    assert json.loads((run / "trace.json").read_text())["traceEvents"]


def test_interrupted_then_under_emulation_with_a_worker_killed_it_goes_on_bit_for_bit(
    place: Place, undisturbed: dict[tuple[int, str], float]
) -> None:
    """One run, and all that can end it early; each time it says why, and leaves nobody behind."""
    process = place.start(*TRAIN, "--run-dir", "disturbed")
    place.wait_for_step("disturbed", 5, process)
    process.send_signal(signal.SIGINT)
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "stopping after step" in said
    assert "Traceback" not in said
    assert main(["report", str(place.path / "disturbed")]) == 0, "what there is can be read"

    heterodyne = (*HETERODYNE, *TRAIN, "--run-dir", "disturbed", "--resume")
    process = place.start("emulate", "--speeds", "0.9,0.9", "--", *heterodyne)
    place.wait_for_step("disturbed", 30, process)
    worker(process, 1).send_signal(signal.SIGKILL)
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGKILL
    assert "rank 1 on" in said
    assert "was killed by SIGKILL" in said
    assert "Traceback" not in said
    assert_nobody_is_left(place)

    status, said = place.run_on(2, *TRAIN, "--run-dir", "disturbed", "--resume")
    assert status == 0, said
    assert "resuming after step" in said
    assert place.losses("disturbed") == undisturbed
    assert_nobody_is_left(place)


def test_another_job_cannot_resume_and_touches_nothing(
    place: Place,
    undisturbed: dict[tuple[int, str], float],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def content(run: Path) -> dict[Path, bytes]:
        return {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}

    before = content(place.path / "undisturbed")
    monkeypatch.chdir(place.path)
    assert main(["train", "job.yaml", "--run-dir", "undisturbed", "--resume", "--set", "training.seed=4"]) == 2
    assert "job.training.seed: 3 there, 4 here" in capsys.readouterr().err
    assert content(place.path / "undisturbed") == before


def test_a_finished_run_is_extended_and_is_then_complete_again(
    place: Place, undisturbed: dict[tuple[int, str], float]
) -> None:
    shutil.copytree(place.path / "undisturbed", place.path / "extended")
    longer = ("--run-dir", "extended", "--resume", "--set", "training.steps=104")
    status, said = place.run_on(2, *TRAIN, *longer)
    assert status == 0, said
    assert "keeps its schedule over 100 steps" in said
    assert {**place.losses("extended"), **undisturbed} == place.losses("extended")
    assert (104, "loss") in place.losses("extended")
    assert json.loads((place.path / "extended" / "summary.json").read_text())["steps"] == 104
    for again in (longer, (*longer[:-1], "training.steps=102")):
        status, said = place.run_on(2, *TRAIN, *again)
        assert (status, "nothing left to do" in said) == (0, True), said


def test_any_shares_are_exact_and_a_model_that_depends_on_the_rank_is_caught(
    place: Place, undisturbed: dict[tuple[int, str], float]
) -> None:
    first = random.Random(7).randrange(9)
    plan = shares(place, "shares.json", *(f"1x{n}" if n else "0" for n in (first, 8 - first)))
    status, said = place.run_on(2, "verify", "job.yaml", "--cluster", "two.yaml", "--plan", plan)
    assert status == 0, said
    assert "exact: loss and all 5 gradients are within 1e-05 of one device" in said
    assert all(f"step {step}" in said for step in range(3))
    assert "count nothing" in said, "the last batch has samples whose labels are ignored"
    drift = ("--set", "model.arguments.drift=0.01", "--batches", "1")
    status, said = place.run_on(2, "verify", "job.yaml", "--cluster", "two.yaml", "--plan", "undisturbed", *drift)
    assert status == 1, said
    assert "NOT exact" in said


def test_steps_of_predicted_weights_are_verified_as_they_would_be_if_they_were_flushed(place: Place) -> None:
    flags = ("parallelism.async=predicted", "parallelism.strategy=pipeline", "parallelism.micro_batch_sizes=[2]")
    sets = [word for flag in (*flags, "training.clip_grad_norm=0") for word in ("--set", flag)]
    status, said = place.run_on(2, "verify", "job.yaml", "--cluster", "two.yaml", "--batches", "1", *sets)
    assert status == 0, said
    assert "Async1F1B" in said
    assert "exact: loss and all 5 gradients are within 1e-05 of one device" in said


def test_a_plan_of_measured_devices_is_json_as_one_on_paper_is(
    place: Place, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(place.path)
    assert main(["plan", "job.yaml", "--json", "--out", "here.json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["plan"] == json.loads((place.path / "here.json").read_text())
    chosen = [row for row in found["alternatives"] if row["chosen"]]
    assert [row["plan"] for row in chosen] == [found["plan"]]
    assert {"objective", "bound_s", "families", "frontier", "export"} <= found.keys()


def test_a_plan_from_datasheets_runs_as_it_stands_on_processors_that_a_file_names(place: Place) -> None:
    """Stages by kind of device and number, bound to the workers that are started."""
    sheet = "backend: cpu, memory: 4 GB, memory_bandwidth: 8 GB/s, link_bandwidth: 1 GB/s, watts: 10"
    (place.path / "kinds.yaml").write_text(
        f"name: kinds\nkinds:\n  FAST: {{{sheet}, peak_tflops: {{fp32: 0.06}}}}\n  SLOW: {{{sheet}, peak_tflops: {{fp32: 0.02}}}}\n"
        "nodes: [{name: vm, devices: [{kind: FAST}, {kind: SLOW, count: 2}], link: {bandwidth: 1 GB/s, latency: 30 us}}]\n"
    )
    status, said = place.run("plan", "job.yaml", "--cluster", "kinds.yaml", "--on-paper")
    assert status == 0, said
    written = json.loads((place.path / "plan.json").read_text())
    kinds = {stage["group"]["kind"] for pipeline in written["pipelines"] for stage in pipeline["stages"]}
    assert kinds <= {"FAST", "SLOW"}
    status, said = place.run_on(
        3, "verify", "job.yaml", "--cluster", "kinds.yaml", "--plan", "plan.json", "--batches", "1"
    )
    assert status == 0, said
    assert "exact: loss and all 5 gradients are within 1e-05 of one device" in said

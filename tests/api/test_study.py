"""``heterodyne study`` on paper: the example, gone on with, and refused."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from heterodyne.api import study as api
from heterodyne.api.paper_costs import captured
from heterodyne.cli.app import run
from heterodyne.errors import InfeasibleError
from heterodyne.graph.ir import ModelGraph
from heterodyne.report.study import Cell, Study

EXAMPLES = Path(__file__).parents[2] / "examples"
SMALL = "model.arguments={vocabulary: 1000, length: 128, width: 256, layers: 2, heads: 4}"
GRAPHS: list[ModelGraph] = []
"""That of the example, captured once."""
TWO = "--devices", "1,2", "--plans", "data,pipeline"


def studied(*options: str) -> int:
    cluster = ("--cluster", "two_generations.yaml")
    return run(["study", "scaling.yaml", *cluster, "--set", SMALL, "--set", "data.sequence_length=128", *options])


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The example, smaller, with all that a study writes."""
    folder = tmp_path_factory.mktemp("study")
    for file in ("scaling.yaml", "gpt.py", "clusters/two_generations.yaml"):
        shutil.copy(EXAMPLES / file, folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(api, "captured", lambda job, base: GRAPHS.append(captured(job, base)) or GRAPHS[0])
        assert studied(*TWO) == 0
    return folder


@pytest.fixture
def place(done: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of it, to go on with."""
    shutil.copytree(done, tmp_path, dirs_exist_ok=True)
    monkeypatch.setattr(api, "captured", lambda job, base: GRAPHS[0])
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_cells_that_another_command_writes_meanwhile_stay_and_are_not_done_again(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    all_cells = Study.load(place / "study.json")
    replace(all_cells, cells=()).save(place / "study.json")
    alone, two, *pipelines = all_cells.cells
    asked = []

    def cell(_: object, count: int, strategy: str) -> Cell:
        if not asked:
            replace(all_cells, cells=tuple(pipelines)).save(place / "study.json")
        asked.append((count, strategy))
        return alone if count == 1 else two

    monkeypatch.setattr(api._Studied, "cell", cell)
    assert studied(*TWO) == 0
    assert asked == [(1, "data"), (2, "data")]
    assert {(c.devices, c.strategy) for c in Study.load(place / "study.json").cells} == {
        (c.devices, c.strategy) for c in all_cells.cells
    }


def test_the_example_is_studied_and_what_cannot_be_is_a_cell(done: Path) -> None:
    study = Study.load(done / "study.json")
    alone, two, refused, pipeline = study.cells
    assert [(c.devices, c.strategy) for c in study.cells] == [
        (1, "data"),
        (2, "data"),
        (1, "pipeline"),
        (2, "pipeline"),
    ]
    assert "needs two devices" in refused.refused
    assert refused.figures is None
    assert alone.predicted is not None
    assert two.predicted is not None
    assert pipeline.predicted is not None
    # Devices of one kind are alike, and none reaches more than it does by itself.
    assert two.bound_samples_per_s == pytest.approx(2 * (alone.bound_samples_per_s or 0))
    assert alone.predicted.samples_per_s == pytest.approx(alone.alone_samples_per_s)
    assert all((c.of_ideal(own) or 2) <= 1 for c, own in study.of("data", "predicted"))
    assert alone.predicted.efficiency is not None
    # By the price in the file and the watts of the datasheet.
    assert (alone.usd_per_hour, alone.watts) == (1.8, 400.0)
    assert alone.usd(alone.predicted) == pytest.approx(1.8 / 3600 * alone.predicted.step_s)
    assert (done / "study.svg").read_text().startswith("<?xml")


def test_the_same_command_does_what_is_left(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = (place / "study.json").read_text()
    planned: list[tuple[int, str]] = []
    plan = api.planned_by_device

    def counted(job, cluster, *known):  # type: ignore[no-untyped-def]
        planned.append((len(cluster.devices), job.parallelism.strategy))
        return plan(job, cluster, *known)

    monkeypatch.setattr(api, "planned_by_device", counted)
    assert studied(*TWO) == 0
    assert planned == []
    assert (place / "study.json").read_text() == whole
    assert "needs two devices" in capsys.readouterr().out, "the table is shown again"

    cut = Study.load(place / "study.json")
    api.replace(cut, cells=cut.cells[:1]).save(
        place / "study.json"
    )  # as it is when a study is killed in its second cell
    assert studied(*TWO) == 0
    assert planned == [(2, "data"), (1, "pipeline"), (2, "pipeline")]
    assert (place / "study.json").read_text() == whole

    assert studied("--devices", "3", "--plans", "data") == 0
    assert planned[3:] == [(3, "data")]
    assert len(Study.load(place / "study.json").cells) == 5, "those that were not asked for stay"


def test_a_study_that_ends_early_has_what_is_done(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = api.planned_by_device

    def killed(job, cluster, *known):  # type: ignore[no-untyped-def]
        if len(cluster.devices) == 2:
            raise KeyboardInterrupt
        return plan(job, cluster, *known)

    monkeypatch.setattr(api, "planned_by_device", killed)
    assert studied(*TWO, "--out", "other.json") == 130
    assert [(c.devices, c.strategy) for c in Study.load(place / "other.json").cells] == [(1, "data")]


def test_a_cell_that_does_not_fit_says_what_is_lacking(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*known: object) -> None:
        raise InfeasibleError("no plan fits:\n  - new-0/A100:0 lacks 3 GiB")

    monkeypatch.setattr(api, "planned_by_device", full)
    assert studied(*TWO, "--out", "other.json") == 0
    out = capsys.readouterr().out
    assert out.count("none: no plan fits: new-0/A100:0 lacks 3 GiB") == 4
    assert not (place / "other.svg").exists(), "there is nothing to draw"


def test_prices_and_the_job_are_part_of_what_a_study_is_of(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cluster = place / "two_generations.yaml"
    text = cluster.read_text()
    cluster.write_text(text.replace("1.80", "1.90"))
    assert studied(*TWO) == 2
    assert "study.json: this study is of another cluster: name another file with --out" in capsys.readouterr().err
    cluster.write_text(text)
    assert studied(*TWO, "--set", "training.global_batch_size=8") == 2
    assert "study.json: this study is of another job" in capsys.readouterr().err
    assert studied(*TWO, "--set", "parallelism.strategy=data", "--set", "checkpoint.every=5") == 0


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (("--devices", "0,1"), "--devices 0,1: '0' is no number of devices; write for example 1,2,4"),
        (("--devices", "-2"), "'-2' is no number of devices"),
        (("--devices", "two"), "'two' is no number of devices"),
        (("--devices", "1,,2"), "'' is no number of devices"),
        (("--devices", "1,17"), "--devices 17: two_generations.yaml has 16 devices; ask for fewer"),
        (("--devices", "1", "--plans", "data,fast"), "'fast' is no strategy; there are auto, data, pipeline, split"),
        (("--devices", "1", "--speeds", "0.5"), "add --run"),
        (
            ("--devices", "1", "--run", "--speeds", "0.5,0.5"),
            "--speeds has 2 workers, and two_generations.yaml 16 devices",
        ),
        (("--devices", "1", "--run", "--speeds", "0.5,x"), "--speeds: 'x' is not a number"),
        (("--devices", "1", "--run", "--profile", "p.json"), "leave out --profile"),
        (("--devices", "1", "--picture", "study.txt"), "a picture is one of .svg, .png, .pdf"),
        (("--devices", "1", "--out", "study.svg"), "--out study.svg: the picture would take its place"),
        (("--devices", "1", "--out", "nowhere/study.json"), "there is no directory nowhere"),
        (("--devices", "1", "--out", "scaling.yaml", "--picture", "x.svg"), "scaling.yaml: cannot be gone on with"),
    ],
)
def test_bad_input_is_one_message(
    place: Path, capsys: pytest.CaptureFixture[str], options: tuple[str, ...], told: str
) -> None:
    assert studied(*options) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert told in line


def test_processors_have_no_datasheet(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (place / "cpu.yaml").write_text("nodes: [{name: here, devices: [{kind: cpu, count: 2, memory: 4 GiB}]}]")
    assert run(["study", "scaling.yaml", "--devices", "1", "--cluster", "cpu.yaml", "--out", "cpu.json"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert (
        "no datasheet says what the CPUs of here do: measure one with 'heterodyne measure' and give --profile" in line
    )


def test_without_devices_or_under_a_launcher(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["study", "scaling.yaml", "--devices", "1"]) == 2
    assert "add --cluster FILE, or --run" in capsys.readouterr().err
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(name, "1" if "WORLD" in name else "0")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "29500")
    assert studied(*TWO) == 2
    assert "a study starts its own workers" in capsys.readouterr().err


def test_cells_of_a_model_whose_code_has_changed_are_not_put_together(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    study = Study.load(place / "study.json")
    before = tuple(replace(cell, model=cell.model and "as it was") for cell in study.cells)
    replace(study, cells=before).save(place / "study.json")
    assert studied("--devices", "3", "--plans", "data") == 2
    assert "study.json: this study is of another model, whose code has been changed" in capsys.readouterr().err
    assert Study.load(place / "study.json").cells == before

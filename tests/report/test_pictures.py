"""Pictures are written, and nothing global is changed by it."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType

import matplotlib as mpl
import pytest

from heterodyne.errors import HeterodyneError
from heterodyne.report.palette import STAGE_COLOURS
from heterodyne.report.run import Run, load_run
from report.pipeline_run import write_pipeline_run
from report.synthetic_run import write_run

PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture
def pictures(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
    return importlib.import_module("pictures")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return load_run(write_run(tmp_path_factory.mktemp("runs") / "drawn", steps=10))


def test_a_run_is_drawn_without_touching_matplotlib(pictures: ModuleType, run: Run, tmp_path: Path) -> None:
    before = dict(mpl.rcParams), mpl.get_backend(auto_select=False)
    path = pictures.run_picture(run, tmp_path / "deep" / "run.png", reference=run.metrics)
    assert path.read_bytes().startswith(PNG)
    assert (dict(mpl.rcParams), mpl.get_backend(auto_select=False)) == before


def test_the_suffix_decides(pictures: ModuleType, run: Run, tmp_path: Path) -> None:
    svg = pictures.run_picture(run, tmp_path / "run.svg", reference=run.metrics).read_text(encoding="utf-8")
    assert "<svg" in svg
    assert "this run, training" in svg
    assert "one device, training" in svg


def test_ratios_show_value_spread_and_claim(pictures: ModuleType, tmp_path: Path) -> None:
    bars = [
        pictures.RatioBar(name="kept", value=1.93, low=1.9, high=1.95, bar=1.85),
        pictures.RatioBar(name="missed", value=0.5, low=0.4, high=0.6, bar=0.92),
        pictures.RatioBar(name="no claim", value=1.0, low=0.9, high=1.1),
    ]
    svg = pictures.ratio_picture(bars, tmp_path / "bars.svg", title="against DDP").read_text(encoding="utf-8")
    for text in ("1.93×", "(claim 1.85×)", "(claim 0.92×)", "no claim", "against DDP"):
        assert text in svg, text
    assert pictures.ratio_picture([], tmp_path / "none.png", title="nothing").read_bytes().startswith(PNG)


def test_a_run_that_left_nothing_cannot_be_drawn(pictures: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(HeterodyneError, match="nothing to draw"):
        pictures.run_picture(Run(directory=tmp_path), tmp_path / "x.png")


@pytest.fixture
def scatter(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
    return importlib.import_module("scatter")


def test_every_kind_is_named_in_the_picture(scatter: ModuleType, tmp_path: Path) -> None:
    points = [scatter.Predicted(kind=f"kind {n % 10}", simulated_s=1.0 + n, measured_s=1.1 + n) for n in range(20)]
    path = scatter.scatter_picture(points, tmp_path / "new" / "truth.svg", title="a title", band=0.12)
    text = path.read_text(encoding="utf-8")
    assert "<svg" in text
    assert all(f"kind {n}" in text for n in range(10))
    assert "within 12%" in text


def test_no_points_make_an_empty_picture(scatter: ModuleType, tmp_path: Path) -> None:
    path = scatter.scatter_picture([], tmp_path / "truth.png", title="nothing", band=0.1)
    assert path.stat().st_size > 0


def test_a_pipeline_is_drawn_in_the_colours_of_its_page(pictures: ModuleType, tmp_path: Path) -> None:
    run = load_run(write_pipeline_run(tmp_path / "pipeline"))
    svg = pictures.run_picture(run, tmp_path / "run.svg").read_text(encoding="utf-8")
    for key in ("F0", "I1", "W2"):
        assert STAGE_COLOURS[key] in svg

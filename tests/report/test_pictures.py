"""Pictures are written, and nothing global is changed by it."""

from __future__ import annotations

from pathlib import Path

import matplotlib as mpl
import pytest

from heterodyne.errors import HeterodyneError
from heterodyne.report.pictures import RatioBar, loss_picture, ratio_picture, run_picture
from heterodyne.report.run import Run, load_run
from report.synthetic_run import write_run

PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return load_run(write_run(tmp_path_factory.mktemp("runs") / "drawn", steps=10))


def test_a_run_is_drawn_without_touching_matplotlib(run: Run, tmp_path: Path) -> None:
    before = dict(mpl.rcParams), mpl.get_backend(auto_select=False)
    path = run_picture(run, tmp_path / "deep" / "run.png", reference=run.metrics)
    assert path.read_bytes().startswith(PNG)
    assert (dict(mpl.rcParams), mpl.get_backend(auto_select=False)) == before


def test_the_suffix_decides(run: Run, tmp_path: Path) -> None:
    svg = loss_picture(run.metrics, tmp_path / "loss.svg", reference=run.metrics, name="ours").read_text(
        encoding="utf-8"
    )
    assert "<svg" in svg
    assert "ours, training" in svg


def test_ratios_show_value_spread_and_claim(tmp_path: Path) -> None:
    bars = [
        RatioBar(name="kept", value=1.93, low=1.9, high=1.95, bar=1.85),
        RatioBar(name="missed", value=0.5, low=0.4, high=0.6, bar=0.92),
        RatioBar(name="no claim", value=1.0, low=0.9, high=1.1),
    ]
    svg = ratio_picture(bars, tmp_path / "bars.svg", title="against DDP").read_text(encoding="utf-8")
    for text in ("1.93×", "(claim 1.85×)", "(claim 0.92×)", "no claim", "against DDP"):
        assert text in svg, text
    assert ratio_picture([], tmp_path / "none.png", title="nothing").read_bytes().startswith(PNG)


def test_a_run_that_left_nothing_cannot_be_drawn(tmp_path: Path) -> None:
    with pytest.raises(HeterodyneError, match="nothing to draw"):
        run_picture(Run(directory=tmp_path), tmp_path / "x.png")

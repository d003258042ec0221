"""The picture of what was predicted against what was measured."""

from __future__ import annotations

from pathlib import Path

from heterodyne.report.scatter import Predicted, scatter_picture


def test_every_kind_is_named_in_the_picture(tmp_path: Path) -> None:
    points = [Predicted(kind=f"kind {n % 10}", simulated_s=1.0 + n, measured_s=1.1 + n) for n in range(20)]
    path = scatter_picture(points, tmp_path / "new" / "truth.svg", title="a title", band=0.12)
    text = path.read_text(encoding="utf-8")
    assert "<svg" in text
    assert all(f"kind {n}" in text for n in range(10))
    assert "within 12%" in text


def test_no_points_make_an_empty_picture(tmp_path: Path) -> None:
    path = scatter_picture([], tmp_path / "truth.png", title="nothing", band=0.1)
    assert path.stat().st_size > 0

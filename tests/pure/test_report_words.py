"""Numbers, plans, axes and tables as people read them."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from heterodyne.plan import MicroBatches
from heterodyne.report import plan_tables, tables, words
from heterodyne.report.axis import axis_of
from heterodyne.report.compare import compare
from heterodyne.report.line_chart import Series, line_chart, smoothed
from heterodyne.report.rows import Column, Rows, show
from heterodyne.report.run import load_run
from report.synthetic_run import cluster, plan, write_run


def test_numbers_have_units_signs_and_sensible_digits() -> None:
    assert words.percent(0.9312) == "93.1 %"
    assert [words.change(e) for e in (0.0234, -0.0234, 0.0001, -0.0001, 12.3)] == [
        "+2.3 %",
        "−2.3 %",
        "±0.0 %",
        "±0.0 %",
        "+1230 %",
    ]
    assert [words.digits(v) for v in (152.34, 3.0418, 0.012345, 1234.5, 0.0)] == ["152", "3.04", "0.0123", "1,234", "0"]
    assert words.ratio(1.919) == "1.92×"
    assert {
        f(None) for f in (words.percent, words.change, words.digits, words.ratio, words.seconds, words.byte_size)
    } == {"–"}
    assert words.digits(float("nan")) == "–"
    assert (
        words.unbroken("needs 1.5 GiB in 20 ms, 4 of 9 samples") == "needs 1.5\u00a0GiB in 20\u00a0ms, 4 of 9 samples"
    )


def test_the_plan_in_words_joins_pipelines_with_the_same_share() -> None:
    assert words.plan_in_words(plan())[1:] == (
        "laptop/cpu:0 takes 28 samples (43.8 %) as 7 micro-batches of 4.",
        "laptop/cpu:1 and laptop/cpu:2 take 14 samples each (21.9 %) as 3 micro-batches of 4, then 1 of 2.",
        "laptop/cpu:3 takes 8 samples (12.5 %) as 2 micro-batches of 4.",
    )


def test_a_zero_share_and_idle_devices_are_said() -> None:
    four = plan()
    none = four.pipelines[3].model_copy(update={"micro_batches": MicroBatches()})
    said = words.plan_in_words(
        four.model_copy(update={"pipelines": (*four.pipelines[:3], none), "idle": ("old/gpu:0",)})
    )
    assert said[-2:] == ("laptop/cpu:3 takes no sample.", "old/gpu:0 takes no part.")


@given(st.lists(st.floats(-1e9, 1e9), min_size=1, max_size=20), st.booleans())
def test_an_axis_holds_all_its_values_and_ticks(values: list[float], snug: bool) -> None:
    axis = axis_of(values, snug=snug)
    margin = 1e-6
    assert all(-margin <= axis.place(v) <= 1 + margin for v in (*values, *axis.ticks))
    assert len(axis.ticks) <= 10


def test_an_axis_ends_at_round_ticks() -> None:
    axis = axis_of([1.87, 5.4], ticks=4)
    assert (axis.low, axis.high, axis.ticks) == (1, 6, (1, 2, 3, 4, 5, 6))


def test_a_line_goes_through_its_points_and_ignores_what_is_not_finite() -> None:
    nan = float("nan")
    chart = line_chart(
        "t", [Series(name="a", points=((0, 0.0), (5, nan), (10, 4.0)), colour=0)], x_title="x", y_title="y"
    )
    assert chart is not None
    assert chart.paths[0].d == "M0.00 1000.00L1000.00 0.00"
    assert line_chart("t", [Series(name="a", points=((0, nan),), colour=0)], x_title="x", y_title="y") is None


def test_a_long_curve_is_thinned_but_keeps_its_spike() -> None:
    points = tuple((float(i), 100.0 if i == 7777 else 1.0 + i % 2) for i in range(20_000))
    chart = line_chart("t", [Series(name="a", points=points, colour=0)], x_title="x", y_title="y")
    assert chart is not None
    drawn = chart.paths[0].d.split("L")
    assert len(drawn) <= 700
    assert any(place.endswith(" 0.00") for place in drawn)


def test_a_running_mean_starts_with_the_first_whole_window() -> None:
    assert smoothed([(0, 1.0), (1, 3.0), (2, 5.0)], 2) == ((1, 2.0), (2, 4.0))


def test_tables_are_plain_text_in_a_pipe_and_never_folded() -> None:
    rows = Rows(
        title="t",
        columns=(Column(title="name"), Column(title="n", align="right")),
        rows=(("a [bold]b[/bold]", "1"), ("c" * 300, "22")),
        marked=frozenset({0}),
        notes=("note",),
    )
    pipe = io.StringIO()
    show(rows, Console(file=pipe, width=80))
    lines = pipe.getvalue().splitlines()
    assert lines[2] == "* a [bold]b[/bold]" + " " * 284 + "   1"
    assert lines[3] == "  " + "c" * 300 + "  22"
    assert "\x1b" not in pipe.getvalue()


def test_tables_are_coloured_on_a_terminal_and_take_texts_as_they_are() -> None:
    rows = Rows(title="t", columns=(Column(title="name"),), rows=(("a [bold]b[/bold]",),), marked=frozenset({0}))
    terminal = io.StringIO()
    show(rows, Console(file=terminal, force_terminal=True, width=80, color_system="standard"))
    assert "\x1b" in terminal.getvalue()
    assert "a [bold]b[/bold]" in terminal.getvalue()


def test_a_row_needs_a_cell_for_each_column() -> None:
    with pytest.raises(ValueError, match="2 columns, a row has 1"):
        Rows(title="t", columns=(Column(title="a"), Column(title="b")), rows=(("x",),))


def test_every_table_of_a_run_can_be_written(tmp_path: Path) -> None:
    run = load_run(write_run(tmp_path / "run", steps=20))
    comparison = compare(run)
    assert run.plan is not None
    shares = plan_tables.plan_rows(run.plan, run.cluster).text()
    assert "28" in shares
    assert "7 micro-batches of 4" in shares
    assert plan_tables.candidate_rows(run.candidates).text().splitlines()[2].startswith("* unequal shares")
    assert words.change(comparison.step.error) in tables.prediction_rows(comparison).text()
    assert words.change(comparison.step.error) in tables.summary_rows(run, comparison).text()
    assert tables.device_rows(cluster()).rows[3][1] == "laptop/cpu:3"


def test_verification_tells_the_worst_first_and_a_nan_is_never_exact() -> None:
    good = tables.verify_rows(1e-8, {"w": 2e-7, "b": 3e-6}, bar=1e-5)
    assert [row[0] for row in good.rows] == ["loss", "b", "w"]
    assert good.notes[-1].startswith("exact")
    batches = [tables.Verified(words="first", loss=0.0, gradients={"w": 2e-7, "b": float("nan")})]
    assert tables.verified_rows(batches, bar=1e-5).rows == (("first", "0.00e+00", "nan", "b", "NO"),)
    bad = tables.verify_rows(1e-8, {"w": float("nan"), "b": 3e-6}, bar=1e-5, worst=1)
    assert bad.rows[1] == ("w", "nan", "NO")
    assert bad.notes == ("1 more gradients have smaller errors", "NOT exact: 1 of 3 are beyond 1e-05")

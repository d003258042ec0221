"""The page of a pipeline: bars in the hue of their stage, messages that do not hide each other, shares that are those of the events."""

from __future__ import annotations

import itertools

import pytest

from heterodyne.report.html import write_report
from heterodyne.report.palette import DARK_STAGES, SERIES, STAGE_COLOURS
from heterodyne.report.run import Run, load_run
from heterodyne.report.sections.stages import stage_section
from heterodyne.report.sections.timelines import lanes, legend
from heterodyne.report.step_times import by_rank, typical
from heterodyne.report.words import percent
from heterodyne.timeline import Timeline
from report.pipeline_run import STAGES, step, write_pipeline_run
from report.synthetic_run import device_names
from report.test_page import Page


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return load_run(write_pipeline_run(tmp_path_factory.mktemp("runs") / "pipeline"))


@pytest.fixture(scope="module")
def page(run: Run) -> Page:
    return Page(write_report(run.directory).read_text(encoding="utf-8"))


def test_each_pass_has_the_hue_of_its_stage_and_each_hue_a_rule(run: Run, page: Page) -> None:
    bars = [a for a in page.of("rect") if "data-t" in a]
    assert run.simulated is not None
    assert len(bars) == 2 * len(run.simulated.events)
    for bar in bars:
        name, key = bar["data-t"].split(" · ")[0], bar["class"].split()[0].removeprefix("k-")
        if "SEND" in name or "RECV" in name:
            assert key == name[1:5]
        elif "STEP" not in name:
            assert key == f"{name[1]}{name[0]}", "kind and stage"
    style = "".join(page.texts)
    assert all(f".k-{key} {{" in style and f"--{key}: {colour}" in style for key, colour in STAGE_COLOURS.items())


def test_sends_and_receives_have_a_half_of_the_lane_each() -> None:
    laid = lanes(Timeline.of("simulated", device_names(STAGES), step()), "t", 1.0, by_stage=True)
    for row in laid.rows:
        places = {bar.key[:4]: (bar.y, bar.y + bar.height) for bar in laid.bars if row.y <= bar.y < row.y + row.height}
        computing = {place for key, place in places.items() if key not in ("SEND", "RECV")}
        (top,) = computing
        stacked = [top, places["SEND"], places["RECV"]]
        assert all(upper[1] <= lower[0] for upper, lower in itertools.pairwise(stacked))
        assert places["RECV"][1] <= row.y + row.height


def test_the_table_of_stages_tells_the_shares_of_the_events(run: Run, page: Page) -> None:
    section = stage_section(run)
    assert section is not None
    assert [row["device"] for row in section["rows"]] == list(device_names(STAGES))
    measured = typical(run.measured)
    assert measured is not None
    for row, times in zip(section["rows"], by_rank(measured), strict=False):
        told = dict(zip(section["parts"], row["cells"], strict=True))
        assert told["bubble"][1] == percent(times.wait_s / times.span_s)
        assert told["backward"][1] == percent((times.seconds("I") + times.seconds("W")) / times.span_s)
    said = " ".join(page.texts)
    assert "under schedule ZBH1" in said
    assert "Mean bubble" in said
    assert "A pipeline of 3 stages: schedule ZBH1." in said
    assert "reduce, not hidden" not in said, "there is one owner of each gradient"


def test_cards_and_shares_count_the_batch_once(page: Page) -> None:
    said = " ".join(page.texts)
    assert "how the 24 samples" in said
    assert said.count("24 samples (100.0") == STAGES + 1, "a card for each stage, and the sentence"
    assert "laptop/cpu:0 → laptop/cpu:1 → laptop/cpu:2" in said


def test_the_legend_names_stages_and_what_is_of_none() -> None:
    assert legend(step()) == (
        ("B0", "stage 0"),
        ("B1", "stage 1"),
        ("B2", "stage 2"),
        ("SEND", "send"),
        ("RECV", "wait for a message"),
        ("STEP", "optimizer step"),
    )


@pytest.mark.parametrize("palette", [STAGE_COLOURS, DARK_STAGES])
def test_the_shades_of_a_stage_differ_in_lightness(palette: dict[str, str]) -> None:
    def lightness(key: str) -> int:
        return sum(int(palette[key][at : at + 2], 16) for at in (1, 3, 5))

    for hue in range(SERIES):
        shades = [lightness(f"{kind}{hue}") for kind in "WBIFR"]
        assert shades == sorted(set(shades))

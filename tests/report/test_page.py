"""The page: it stands alone, it says what is missing, and its bars are the events."""

from __future__ import annotations

import itertools
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from heterodyne.errors import HeterodyneError
from heterodyne.report.html import write_report
from heterodyne.report.run import load_run
from heterodyne.report.sections.sites import took_part
from heterodyne.report.sections.timelines import lanes, lengths_in_words
from heterodyne.report.step_times import median_step, typical
from heterodyne.timeline import Event, Timeline
from report.synthetic_run import write_run

VOID = {"meta", "link", "br", "img", "hr", "input"}


class Page(HTMLParser):
    """Elements with their attributes, texts, and whether every element is closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str]]] = []
        self.texts: list[str] = []
        self.open: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, {name: value or "" for name, value in attrs}))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, {name: value or "" for name, value in attrs}))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)

    def of(self, tag: str) -> list[dict[str, str]]:
        return [attributes for name, attributes in self.elements if name == tag]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("runs") / "first", steps=40)


@pytest.fixture(scope="module")
def page(directory: Path) -> Page:
    return Page(write_report(directory).read_text(encoding="utf-8"))


@pytest.mark.tour("report/")
def test_the_page_is_whole_and_loads_nothing(directory: Path, page: Page) -> None:
    assert page.open == []
    loads = [a[name] for _, a in page.elements for name in ("src", "href", "data", "action", "srcset") if name in a]
    assert loads == ["data:,"]
    text = (directory / "report.html").read_text(encoding="utf-8")
    assert not re.search(r"https?://|@import|url\(", text)


def test_the_page_tells_the_figures(page: Page) -> None:
    said = " ".join(page.texts)
    for words in (
        "Efficiency",
        "Prediction error",
        "28 samples (43.8",
        "equal shares",
        "Step time",
        "GPT, 10.7",
        "gloo",
    ):
        assert words in said, words
    assert "could not read" not in said


def test_bars_stand_where_the_events_are(directory: Path, page: Page) -> None:
    run = load_run(directory)
    assert run.measured is not None
    assert run.simulated is not None
    step = median_step(run.measured)
    assert step is not None
    shown = [run.simulated, run.measured.of_step(step)]
    events = [event for timeline in shown for event in timeline.events]
    bars = [a for a in page.of("rect") if "data-t" in a]
    assert len(bars) == len(events)
    axis_s = 1.005 * max(timeline.span_s for timeline in shown)
    for bar, event in zip(bars, events, strict=True):
        assert float(bar["x"].rstrip("%")) == pytest.approx(100 * event.start_s / axis_s, abs=1e-3)
        assert float(bar["width"].rstrip("%")) == pytest.approx(100 * event.seconds / axis_s, abs=1e-3)
        assert bar["class"].split()[0] == f"k-{event.kind}"
        assert bar["data-t"].startswith(f"{event.name} · ")


def test_ranks_are_rows_and_lanes_do_not_touch() -> None:
    events = [
        Event(rank=rank, lane=lane, kind="F", name="0F0", step=0, start_s=0.0, end_s=1.0)
        for rank in range(3)
        for lane in ("compute", "comm")
    ]
    laid = lanes(Timeline.of("measured", ["a", "b", "c"], events), "t", 2.0)
    assert {(bar.x, bar.width) for bar in laid.bars} == {(0.0, 50.0)}
    places = sorted((bar.y, bar.y + bar.height) for bar in laid.bars)
    assert all(below[0] > above[1] for above, below in itertools.pairwise(places))
    for row, pair in zip(laid.rows, zip(places[::2], places[1::2], strict=True), strict=True):
        assert row.y == pair[0][0]
        assert row.y + row.height == pair[1][1]
    assert laid.end == 50.0


def test_a_timeline_that_is_longer_than_the_step_time_is_not_explained_by_what_makes_it_shorter() -> None:
    longer, shorter = lengths_in_words("Measured", 1.08, 0.948), lengths_in_words("Measured", 0.9, 0.948)
    assert "1.08 s" in longer
    assert "948 ms" in longer
    assert "begin the next step while others still work" in longer
    assert "reading the batch" not in longer
    assert "reading the batch" in shorter
    assert "next step" not in shorter
    assert lengths_in_words("Predicted", 0.9611, 0.961) == lengths_in_words("Predicted", 1.0, None) == ""


def test_stacked_bars_add_up_to_the_step(directory: Path, page: Page) -> None:
    run = load_run(directory)
    both = [t for t in (typical(run.simulated), typical(run.measured)) if t is not None]
    stacks: list[float] = []
    for tag, attributes in page.elements:
        classes = attributes.get("class", "").split()
        if "stack-bar" in classes:
            stacks.append(0.0)
        elif tag == "span" and attributes.get("data-t", "").startswith(("predicted ·", "measured ·")):
            stacks[-1] += float(attributes["style"].removeprefix("width:").rstrip("%"))
    assert len(stacks) == 8
    predicted, measured = (100 * t.span_s / max(p.span_s for p in both) for t in both)
    assert stacks == pytest.approx([predicted, measured] * 4, abs=0.01)  # every rank is given the whole step


def test_names_are_escaped(tmp_path: Path) -> None:
    evil = "<script>alert(1)</script>\"'&"
    directory = write_run(tmp_path / "<b>run", steps=4)
    cluster = json.loads((directory / "cluster.json").read_text(encoding="utf-8"))
    cluster["name"] = cluster["devices"][0]["id"] = evil
    (directory / "cluster.json").write_text(json.dumps(cluster), encoding="utf-8")
    profile = json.loads((directory / "profile.json").read_text(encoding="utf-8"))
    profile["devices"][evil] = profile["devices"].pop("laptop/cpu:0")
    (directory / "profile.json").write_text(json.dumps(profile), encoding="utf-8")
    rows = [{"name": evil, "step_s": 1, "samples_per_s": 1, "chosen": True, "why": evil}]
    (directory / "candidates.json").write_text(json.dumps(rows), encoding="utf-8")
    page = Page(write_report(directory).read_text(encoding="utf-8"))
    assert len(page.of("script")) == 1
    assert page.open == []
    assert "<b>run" in "".join(page.texts)
    assert evil in "".join(page.texts)


@pytest.mark.parametrize("kept", ["job.yaml", "plan.json", "metrics.jsonl"])
def test_a_run_of_one_file_still_gives_a_page(tmp_path: Path, kept: str) -> None:
    directory = write_run(tmp_path / "run", steps=4)
    for file in directory.iterdir():
        if file.name != kept:
            file.unlink()
    page = Page(write_report(directory).read_text(encoding="utf-8"))
    said = " ".join(page.texts)
    assert "summary.json is missing" in said
    assert "could not read" in said


def test_empty_metrics_and_cut_timelines_give_a_page(tmp_path: Path) -> None:
    directory = write_run(tmp_path / "run", steps=4)
    (directory / "metrics.jsonl").write_text("", encoding="utf-8")
    (directory / "summary.json").unlink()
    timeline = directory / "timeline-measured.jsonl"
    timeline.write_text(timeline.read_text(encoding="utf-8")[:-20], encoding="utf-8")
    page = Page(write_report(directory).read_text(encoding="utf-8"))
    said = " ".join(page.texts)
    assert "the run ended before its first" in said
    assert "cut short" in said
    assert "Measured is step" in said


def test_losses_that_are_not_finite_are_no_trap(tmp_path: Path) -> None:
    directory = write_run(tmp_path / "run", steps=4)
    lines = [
        '{"step": 1, "loss": NaN, "step_s": 1.0}',
        '{"step": 2, "loss": Infinity, "step_s": 1.0, "efficiency": NaN}',
    ]
    (directory / "metrics.jsonl").write_text("\n".join(lines), encoding="utf-8")
    page = Page(write_report(directory).read_text(encoding="utf-8"))
    assert page.open == []
    assert not any("nan" in a.get("d", "") or "inf" in a.get("d", "") for a in page.of("path"))


def test_a_reference_is_drawn_beside(directory: Path, tmp_path: Path) -> None:
    other = write_run(tmp_path / "one-device", steps=40, seed=3)
    text = write_report(directory, tmp_path / "out" / "page.html", reference_metrics=other).read_text(encoding="utf-8")
    assert "one device on the same batches" in text
    assert (tmp_path / "out" / "trace.json").is_file()
    with pytest.raises(HeterodyneError, match="cannot be read"):
        write_report(directory, tmp_path / "x.html", reference_metrics=tmp_path / "none.jsonl")


def test_many_ranks_stay_one_page(tmp_path: Path) -> None:
    directory = write_run(tmp_path / "many", ranks=64, steps=4)
    path = write_report(directory, tmp_path)
    page = Page(path.read_text(encoding="utf-8"))
    assert path == tmp_path / "report.html"
    cards = [a for a in page.of("article") if a.get("class") == "card"]
    assert len(cards) == 3  # 64 devices of three unlike shares
    assert path.stat().st_size < 4 * 2**20


def test_a_run_with_other_sites_says_that_it_is_inexact_and_what_they_cost(tmp_path: Path) -> None:
    run = write_run(tmp_path / "site", steps=20)
    sync = "  sync: {sites: outer, shares: {north: 40, south: 24}, at: 'a:1', site: south, every: 10}\n"
    (run / "job.yaml").write_text((run / "job.yaml").read_text() + sync)
    outer = {"fragment": 0, "sent_bytes": 1 << 20, "received_bytes": 1 << 20, "wait_s": 0.5}
    with (run / "metrics.jsonl").open("a") as file:
        for number, sites in ((1, "north 62.5%, south 37.5%"), (2, "north 100.0%")):
            line = {"step": 10 * number, "outer_step": number, "sites": sites, "time_s": 60.0 * number, **outer}
            file.write(json.dumps(line) + "\n")
    read = load_run(run)
    assert read.job is not None
    assert read.job.training.global_batch_size == 24, "that of its site"
    assert len(read.metrics.steps) == 20
    text = " ".join(Page(write_report(run).read_text(encoding="utf-8")).texts)
    for told in (
        "site south of 2: inexact, as asked for",
        "site south takes over an outer average of 2 sites every 10 steps",
        "2 MiB an outer step, 2.81 GiB a day; 500 ms of waiting in each",
        "2 of 2",
        "1 of 2",
    ):
        assert told in " ".join(text.split()), told
    assert took_part(read) == {"north": "2 of 2", "south": "1 of 2"}

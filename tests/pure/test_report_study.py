"""The file of a scaling study, and what follows from it, with numbers worked out by hand."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from heterodyne.errors import FileError
from heterodyne.job import Strategy
from heterodyne.report.study import Cell, Figures, Origin, Study
from heterodyne.report.study_shown import study_picture, study_rows
from heterodyne.report.words import DASH

NOTHING = Study(name="gpt", job="j", cluster="c", batch=32)


def figures(step_s: float) -> Figures:
    return Figures(step_s=step_s, samples_per_s=32 / step_s, efficiency=0.9, memory_bytes=2**30)


def cell(devices: int, strategy: Strategy, step_s: float | None, measured_s: float | None = None) -> Cell:
    """Of devices that reach 10 samples/s each, cost 3.6 usd in an hour each, and draw 100 W each."""
    return Cell(
        devices=devices,
        strategy=strategy,
        origin="datasheets" if measured_s is None else "run",
        plan="balanced",
        predicted=None if step_s is None else figures(step_s),
        measured=None if measured_s is None else figures(measured_s),
        bound_samples_per_s=10.0 * devices,
        alone_samples_per_s=8.0,
        usd_per_hour=3.6 * devices,
        watts=100.0 * devices,
        refused=""
        if (step_s, measured_s) != (None, None)
        else "no plan fits:\n  - cpu:0 lacks 3 GiB\n  - cpu:1 lacks 2 GiB",
    )


def of(*cells: Cell) -> Study:
    study = NOTHING
    for each in cells:
        study = study.with_cell(each)
    return study


STUDY = of(cell(4, "data", 1.6), cell(1, "data", 4.0), cell(2, "pipeline", 2.0), cell(1, "pipeline", None))


def column(study: Study, title: str) -> list[str]:
    rows = study_rows(study)
    place = [each.title for each in rows.columns].index(title)
    return [row[place] for row in rows.rows]


def test_what_follows_from_the_steps() -> None:
    assert [(c.devices, c.strategy) for c in STUDY.cells] == [
        (1, "data"),
        (4, "data"),
        (1, "pipeline"),
        (2, "pipeline"),
    ]
    assert column(STUDY, "speed-up") == ["1.00×", "2.50×", DASH, "1.00×"], "the smallest that a plan was found for is 1"
    assert column(STUDY, "over the best device") == ["1.00×", "2.50×", DASH, "2.00×"]
    assert column(STUDY, "of the ideal") == ["80.0 %", "50.0 %", DASH, "80.0 %"]
    # 1,000,000 samples are 31,250 steps of 4 s, at 0.001 usd/s: 125 usd; on four devices each second costs four times as much.
    assert column(STUDY, "usd/1M samples") == ["125", "200", DASH, "125"]
    assert column(STUDY, "J/step") == ["400", "640", DASH, "400"]
    assert column(STUDY, "plan")[2] == "none: no plan fits: cpu:0 lacks 3 GiB"
    assert STUDY.ideal == ((1, 10.0), (2, 20.0), (4, 40.0))


def test_traffic_between_places_is_paid_by_the_step() -> None:
    paid = replace(cell(1, "data", 4.0), traffic_usd=0.5)
    assert paid.predicted is not None
    assert paid.usd(paid.predicted) == pytest.approx(0.504)


def test_predicted_and_measured_stand_side_by_side_and_are_not_mixed() -> None:
    both = of(cell(1, "data", 4.0, 5.0), cell(2, "data", 2.0, 4.0), cell(4, "data", 1.0))
    assert column(both, "step, predicted") == ["4 s", "2 s", "1 s"]
    assert column(both, "measured") == ["5 s", "4 s", DASH]
    assert column(both, "error") == ["−20.0 %", "−50.0 %", DASH]
    assert column(both, "speed-up") == ["1.00×", "1.25×", "4.00×"], "measured over measured, predicted over predicted"


def test_what_nobody_knows_is_said_and_is_no_zero() -> None:
    bare = of(*(replace(c, usd_per_hour=None, watts=None) for c in STUDY.cells))
    rows = study_rows(bare)
    assert not {"usd/1M samples", "J/step"} & {each.title for each in rows.columns}
    assert "The power of some devices is not known: write 'watts:' into the cluster file." in rows.notes
    some = of(cell(1, "data", 4.0), replace(cell(2, "data", 2.0), watts=None))
    assert column(some, "J/step") == ["400", DASH]
    assert column(some, "usd/1M samples") == ["125", "125"]


@pytest.mark.parametrize("suffix", [".svg", ".png"])
@pytest.mark.parametrize(
    "study",
    [
        STUDY,
        of(cell(1, "data", 4.0, 5.0)),
        of(
            replace(
                cell(2, "split", 4.0), usd_per_hour=None, watts=None, bound_samples_per_s=None, alone_samples_per_s=None
            )
        ),
    ],
    ids=["several", "one", "of which little is known"],
)
def test_a_picture_of_whatever_is_known(study: Study, suffix: str, tmp_path: Path) -> None:
    path = study_picture(study, tmp_path / f"study{suffix}")
    assert path.stat().st_size > 5_000


POSITIVE = st.floats(1e-6, 1e6)
CELLS = st.builds(
    cell,
    st.integers(1, 64),
    st.sampled_from(["data", "pipeline", "split"]),
    st.one_of(st.none(), POSITIVE),
    st.one_of(st.none(), POSITIVE),
)


@given(st.lists(CELLS, max_size=8))
def test_a_study_survives_its_file(tmp_path_factory: pytest.TempPathFactory, cells: list[Cell]) -> None:
    study, path = of(*cells), tmp_path_factory.getbasetemp() / "study.json"
    study.save(path)
    assert Study.load(path) == study
    assert NOTHING.going_on(Study.load(path), path) == study
    assert len(study_rows(study).rows) == len({(c.devices, c.strategy) for c in cells})


@pytest.mark.parametrize(
    ("there", "asked", "done"),
    [
        ("datasheets", "datasheets", True),
        ("datasheets", "profile", False),
        ("profile", "run", False),
        ("run", "profile", True),
    ],
)
def test_a_cell_is_done_again_only_by_what_knows_more(there: Origin, asked: Origin, done: bool) -> None:
    study = of(replace(cell(2, "data", 1.0), origin=there))
    assert study.done(2, "data", asked) is done
    assert not study.done(4, "data", asked)
    assert not study.done(2, "split", asked)


@pytest.mark.parametrize("field", ["job", "cluster", "profile", "set of emulated workers"])
def test_a_study_of_something_else_is_not_gone_on_with(field: str) -> None:
    found = replace(STUDY, profile="p", speeds=(0.5,))
    other = {"profile": {"profile": "q"}, "set of emulated workers": {"speeds": (0.4,)}}.get(field, {field: "x"})
    with pytest.raises(FileError, match=f"study.json: this study is of another {field}: name another file with --out"):
        replace(NOTHING, **other).going_on(found, Path("study.json"))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("{", "cannot be gone on with"),
        ("[]", "it is no study"),
        ('{"kind": "plans"}', "it is no study"),
        ('{"kind": "study"}', "name: Field required"),
    ],
)
def test_a_file_that_is_no_study(text: str, told: str, tmp_path: Path) -> None:
    path = tmp_path / "study.json"
    path.write_text(text)
    with pytest.raises(FileError, match=told):
        Study.load(path)


def test_a_damaged_study(tmp_path: Path) -> None:
    path = tmp_path / "study.json"
    STUDY.save(path)
    content = json.loads(path.read_text())
    for key, value in (("devices", 0), ("strategy", "fast"), ("watts", -1), ("refused", None), ("more", 1)):
        broken = json.loads(json.dumps(content))
        broken["cells"][0][key] = value
        path.write_text(json.dumps(broken))
        with pytest.raises(FileError, match=rf"cells\.0\.{key}"):
            Study.load(path)
    path.write_text(json.dumps(content)[:-20])
    with pytest.raises(FileError, match="or move this one away to begin again"):
        Study.load(path)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        (replace(STUDY, cells=(*STUDY.cells, STUDY.cells[0])), "is there twice"),
        (replace(STUDY, cells=(replace(STUDY.cells[0], refused="because"),)), "or both"),
        (replace(STUDY, cells=(replace(STUDY.cells[0], predicted=None),)), "neither figures nor a reason"),
        (replace(STUDY, batch=64), "a step and samples/s that are not of 64 samples"),
    ],
)
def test_a_file_that_no_study_has_written_is_refused(tmp_path: Path, changed: Study, said: str) -> None:
    changed.save(tmp_path / "study.json")
    with pytest.raises(FileError, match=said):
        Study.load(tmp_path / "study.json")

"""Files that people write: whatever is wrong is told with its line and a way out."""

from __future__ import annotations

from pathlib import Path

import pytest

from heterodyne.documents import Section, read_yaml, validate
from heterodyne.errors import FileError, JobError


class Inner(Section):
    size: int = 1
    names: tuple[str, ...] = ()


class Outer(Section):
    inner: Inner = Inner()
    parts: tuple[Inner, ...] = ()
    needed: int


def read(tmp_path: Path, text: str) -> Outer:
    path = tmp_path / "file.yaml"
    path.write_text(text, encoding="utf-8")
    content, lines = read_yaml(path, JobError)
    return validate(Outer, content, error=JobError, path=str(path), lines=lines)


def refused(tmp_path: Path, text: str) -> FileError:
    with pytest.raises(JobError) as caught:
        read(tmp_path, text)
    return caught.value


def test_a_good_file_is_read(tmp_path: Path) -> None:
    assert read(tmp_path, "needed: 3\ninner:\n  size: 2\n") == Outer(needed=3, inner=Inner(size=2))


def test_an_unknown_key_names_its_line_and_the_nearest_known_one(tmp_path: Path) -> None:
    error = refused(tmp_path, "needed: 3\ninner:\n  size: 2\n  nmes: [a]\n")
    assert error.line == 4
    assert "did you mean 'names'?" in str(error)


def test_an_unknown_key_far_from_all_names_lists_what_there_is(tmp_path: Path) -> None:
    error = refused(tmp_path, "needed: 3\nqqq: 1\n")
    assert error.line == 2
    assert "it can be: inner, parts, needed" in str(error)


def test_an_unknown_key_in_a_list_is_found_too(tmp_path: Path) -> None:
    error = refused(tmp_path, "needed: 3\nparts:\n  - size: 1\n  - sise: 2\n")
    assert error.line == 4
    assert "did you mean 'size'?" in str(error)


def test_a_key_given_twice_names_both_lines(tmp_path: Path) -> None:
    error = refused(tmp_path, "needed: 3\ninner:\n  size: 2\nneeded: 4\n")
    assert error.line == 4
    assert "given twice (first on line 1)" in str(error)


@pytest.mark.tour("documents.py")
def test_all_faults_are_told(tmp_path: Path) -> None:
    error = refused(tmp_path, "inner:\n  size: many\nextra: 1\n")
    assert error.line == 1  # 'needed' is missing from the document that begins there
    assert "needed: is missing" in str(error)
    assert "line 2: inner.size" in str(error)
    assert "line 3: extra" in str(error)


@pytest.mark.parametrize(
    ("text", "says"),
    [("", "is empty"), ("a: [1\n", "not YAML"), ("a: 1\n b: 2\n", "not YAML"), ("a: !x 1\n", "not YAML")],
)
def test_what_is_not_yaml_is_said_so(tmp_path: Path, text: str, says: str) -> None:
    assert says in str(refused(tmp_path, text))


def test_missing_and_binary_files(tmp_path: Path) -> None:
    with pytest.raises(JobError, match="No such file"):
        read_yaml(tmp_path / "none.yaml", JobError)
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(JobError, match="not UTF-8"):
        read_yaml(tmp_path / "bytes", JobError)


def test_sections_are_immutable() -> None:
    with pytest.raises(ValueError, match="frozen"):
        Inner().size = 4

"""Files that are written whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from heterodyne.text_files import write_text


def test_a_write_that_fails_leaves_what_was_there(tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    write_text(file, "old")
    with pytest.raises(UnicodeEncodeError):
        write_text(file, "new" * 10_000 + "\udcff")
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("plan.json", "old")]


def test_a_link_and_the_mode_of_a_file_stay(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("old")
    (tmp_path / "file").chmod(0o640)
    (tmp_path / "link").symlink_to("file")
    write_text(tmp_path / "link", "new")
    assert (tmp_path / "link").is_symlink()
    assert ((tmp_path / "file").read_text(), (tmp_path / "file").stat().st_mode & 0o777) == ("new", 0o640)


def test_a_pipe_is_written_to_and_not_replaced() -> None:
    """As /dev/null is, which root could replace for everybody."""
    reading, writing = os.pipe()
    try:
        write_text(Path(f"/dev/fd/{writing}"), "text")
        assert os.read(reading, 10) == b"text"
    finally:
        os.close(reading)
        os.close(writing)

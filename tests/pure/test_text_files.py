"""Files that are written whole or not at all."""

from __future__ import annotations

import contextlib
import os
import socket
from pathlib import Path

import pytest

from heterodyne.text_files import read_text, require_regular_in, write_text


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


@pytest.mark.parametrize("kind", ["pipe", "socket", "device", "directory", "large", "NUL", "loop"])
def test_only_regular_files_are_opened_and_nothing_waits(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "file"
    match kind:
        case "pipe":
            os.mkfifo(path)
        case "socket":
            with socket.socket(socket.AF_UNIX) as bound, contextlib.chdir(tmp_path):
                bound.bind("file")
        case "device":
            path.symlink_to("/dev/zero")
        case "directory":
            path.mkdir()
        case "large":
            path.touch()
            os.truncate(path, 2**40)
        case "loop":
            path.symlink_to("file")
        case _:
            path = Path("\0")
    with pytest.raises(OSError, match=r"pipe|socket|device|directory|more than|NUL|null|symbolic"):
        read_text(path)
    if kind in ("pipe", "socket", "device"):
        with pytest.raises(OSError, match="no regular file"):
            require_regular_in(tmp_path)


def test_a_pipe_that_nobody_reads_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="No such device"):
        write_text(tmp_path / "pipe", "text")


def test_a_private_file_is_read_by_its_owner_alone(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("old")
    write_text(tmp_path / "file", "new", private=True)
    assert (tmp_path / "file").stat().st_mode & 0o777 == 0o600

"""Which files are the text, and what is said when there is none."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from heterodyne.errors import DataError
from heterodyne.runtime.data.corpus import fingerprint, text_sources


def write(root: Path, files: dict[str, bytes]) -> None:
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(content)


def names(root: Path, *entries: str) -> list[str]:
    return [source.path.relative_to(root).as_posix() for source in text_sources(entries or (".",), base=root)]


def test_the_standard_library_is_enough_text_in_a_stable_order() -> None:
    sources = text_sources("stdlib")
    assert sum(source.bytes for source in sources) > 10e6
    assert sources == text_sources("stdlib")
    assert not any({"site-packages", "test", "tests"} & set(source.path.parts) for source in sources)


def test_a_directory_gives_its_text_by_path(tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            "b.txt": b"b",
            "a/z.md": "ümlaut".encode("latin-1"),
            "a/c/d": b"no suffix",
            "a-1.txt": b"paths are sorted by their parts: a/ comes before a-1",
            "empty.txt": b"",
            ".git/config": b"hidden",
            ".hidden": b"hidden",
            "image.png": b"\x89PNG\0\0",
            "wide.txt": "wide".encode("utf-16"),
        },
    )
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    (tmp_path / "a" / "circle").symlink_to(tmp_path, target_is_directory=True)
    assert names(tmp_path) == ["a/c/d", "a/z.md", "a-1.txt", "b.txt", "wide.txt"]


def test_files_keep_the_order_they_are_named_in_and_none_is_taken_twice(tmp_path: Path) -> None:
    write(tmp_path, {"d/one": b"1", "d/two": b"2"})
    assert names(tmp_path, "d/two", "d") == ["d/two", "d/one"]


def test_the_fingerprint_changes_with_path_size_and_time(tmp_path: Path) -> None:
    write(tmp_path, {"one": b"1", "two": b"2"})
    seen = {fingerprint(text_sources((".",), base=tmp_path))}
    os.utime(tmp_path / "one", ns=(1, 1))
    seen.add(fingerprint(text_sources((".",), base=tmp_path)))
    write(tmp_path, {"two": b"22"})
    os.utime(tmp_path / "two", ns=(1, 1))
    seen.add(fingerprint(text_sources((".",), base=tmp_path)))
    (tmp_path / "two").rename(tmp_path / "three")
    seen.add(fingerprint(text_sources((".",), base=tmp_path)))
    assert len(seen) == 4


@pytest.mark.parametrize(
    ("entries", "told"),
    [
        ((), "names nothing"),
        (("nowhere",), "there is no such file or directory"),
        (("empty",), "is empty"),
        (("folder",), "has no text"),
    ],
)
def test_what_is_no_text_is_refused_by_name(tmp_path: Path, entries: tuple[str, ...], told: str) -> None:
    write(tmp_path, {"empty": b"", "folder/empty": b"", "folder/binary": b"\0"})
    with pytest.raises(DataError, match=told) as caught:
        text_sources(entries, base=tmp_path)
    assert all(str(tmp_path / entry) in str(caught.value) for entry in entries)


@pytest.mark.skipif(os.geteuid() == 0, reason="root can read every file")
@pytest.mark.parametrize("entry", ["folder", "folder/locked"])
def test_a_file_without_access_is_refused_by_name(tmp_path: Path, entry: str) -> None:
    write(tmp_path, {"folder/locked": b"text"})
    (tmp_path / "folder" / "locked").chmod(0)
    with pytest.raises(DataError, match=r"locked cannot be read \(Permission denied\)"):
        text_sources((entry,), base=tmp_path)

"""Token files: written once, never believed without a look."""

from __future__ import annotations

import io
import pickle
import threading
import zipfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from heterodyne.errors import DataError
from heterodyne.runtime.data.corpus import Source, text_sources
from heterodyne.runtime.data.tokens import HEADER_BYTES, open_token_file, open_tokens, read_tokens

TEXT = {"a": b"first file", "b": "zweite Dätei".encode()}


@pytest.fixture
def sources(tmp_path: Path) -> tuple[Source, ...]:
    folder = tmp_path / "text"
    folder.mkdir()
    for name, content in TEXT.items():
        (folder / name).write_bytes(content)
    return text_sources(str(folder))


def test_the_tokens_are_the_bytes_of_the_files_joined_by_zeros(sources: tuple[Source, ...], tmp_path: Path) -> None:
    said: list[str] = []
    file = open_tokens(sources, tmp_path / "cache", say=said.append)
    assert file.tokens.tobytes() == b"\0".join(TEXT.values())
    assert not file.tokens.flags.writeable
    again = open_tokens(sources, tmp_path / "cache", say=said.append)
    assert again.digest == file.digest
    assert len(said) == 1, "the second time nothing is read"


def test_the_same_text_elsewhere_is_the_same_data(sources: tuple[Source, ...], tmp_path: Path) -> None:
    here = open_tokens(sources, tmp_path / "cache", say=lambda _: None)
    (tmp_path / "text").rename(tmp_path / "moved")
    there = open_tokens(text_sources(str(tmp_path / "moved")), tmp_path / "cache", say=lambda _: None)
    assert there.path != here.path
    assert there.digest == here.digest


@given(data=st.data())
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_damaged_file_is_read_anew_and_it_is_said(
    data: st.DataObject, sources: tuple[Source, ...], tmp_path: Path
) -> None:
    file = open_tokens(sources, tmp_path / "cache", say=lambda _: None)
    whole = file.path.read_bytes()
    header = len(whole[:HEADER_BYTES].rstrip(b"\0"))  # the padding means nothing
    place = data.draw(st.sampled_from([*range(header), *range(HEADER_BYTES, len(whole))]))
    damage = data.draw(st.sampled_from(["cut", "flip", "grow"]))
    flipped = whole[:place] + bytes([whole[place] ^ (1 << data.draw(st.integers(0, 7)))]) + whole[place + 1 :]
    file.path.write_bytes({"cut": whole[:place], "flip": flipped, "grow": whole + b"x"}[damage])
    said: list[str] = []
    again = open_tokens(sources, tmp_path / "cache", say=said.append)
    assert again.tokens.tobytes() == b"\0".join(TEXT.values())
    assert again.path.read_bytes() == whole
    assert any("reading the text again" in line for line in said)


def test_a_cut_file_says_how_many_bytes_it_lacks(sources: tuple[Source, ...], tmp_path: Path) -> None:
    file = open_tokens(sources, tmp_path / "cache", say=lambda _: None)
    whole = file.path.read_bytes()
    file.path.write_bytes(whole[:-3])
    with pytest.raises(DataError, match=f"has {len(whole) - 3} bytes, its header says {len(whole)}"):
        read_tokens(file.path)


def test_many_at_once_all_get_the_whole_text(sources: tuple[Source, ...], tmp_path: Path) -> None:
    start = threading.Barrier(8)
    texts: list[bytes] = []

    def one() -> None:
        start.wait()
        texts.append(open_tokens(sources, tmp_path / "cache", say=lambda _: None).tokens.tobytes())

    threads = [threading.Thread(target=one) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert texts == [b"\0".join(TEXT.values())] * 8
    assert [path.suffix for path in (tmp_path / "cache").iterdir()] == [".bin"], "nothing half-written is left"


def test_a_cache_that_cannot_be_written_is_named(sources: tuple[Source, ...], tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file, not a directory")
    with pytest.raises(DataError, match=r"set data\.cache"):
        open_tokens(sources, tmp_path / "cache", say=lambda _: None)


def archive() -> bytes:
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as file:
        file.writestr("tokens.npy", b"")
    return content.getvalue()


def of_objects() -> bytes:
    content = io.BytesIO()
    np.save(content, np.array([{}], dtype=object), allow_pickle=True)
    return content.getvalue()


@pytest.mark.parametrize(
    "content", [b"PK\x03\x04", archive(), of_objects(), pickle.dumps([1]), b"", b"\x93NUMPY"], ids=range(6)
)
def test_what_is_no_row_of_numbers_is_no_token_file(tmp_path: Path, content: bytes) -> None:
    """Archives and pickles, which numpy.load takes too."""
    (tmp_path / "tokens.npy").write_bytes(content)
    with pytest.raises(DataError, match=r"tokens\.npy .* is no whole \.npy file"):
        open_token_file(tmp_path / "tokens.npy")

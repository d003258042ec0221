"""Which files are the text: Python's standard library, or files and directories of the user's.

The order of the files is that of their paths, so the same files give the same text. Text is bytes, whatever its
encoding; a file in a directory that has a NUL byte near its start, and no byte order mark, is not text and is left out
(git's rule), as are hidden files and empty ones. A file that is named itself is always taken.
"""

from __future__ import annotations

import hashlib
import os
import sysconfig
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from heterodyne.errors import DataError
from heterodyne.json_files import parse_json
from heterodyne.text_files import open_regular, read_text, require_regular

__all__ = [
    "STANDARD_LIBRARY",
    "JsonLines",
    "PaddedDocuments",
    "Source",
    "TextFiles",
    "fingerprint",
    "reading",
    "text_sources",
]

STANDARD_LIBRARY = "stdlib"
_NOT_OUR_TEXT = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"})
_MACHINE_DEPENDENT = ("_sysconfigdata", "sitecustomize", "usercustomize", "python-config")
_BYTE_ORDER_MARKS = (b"\xff\xfe", b"\xfe\xff")
_PROBE_BYTES = 8192


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """One file of text, as it was when it was looked at."""

    path: Path
    bytes: int
    modified_ns: int


def text_sources(text: str | Sequence[str], *, base: Path | None = None) -> tuple[Source, ...]:
    """The files behind ``data.text`` of a job, in a stable order, none of them empty, none twice.

    Args:
        text: ``stdlib``, or paths of files and directories (searched to the bottom), or several of these.
        base: what relative paths start from; None: the current directory.

    Raises DataError for a path that is missing, cannot be read, or holds no text.
    """
    entries = (text,) if isinstance(text, str) else tuple(text)
    if not entries or not all(entries):
        raise DataError(
            f"data.text names nothing, or an empty path; give files or directories of text, or {STANDARD_LIBRARY!r}"
        )
    found: dict[Path, Source] = {}
    for entry in entries:
        for source in _standard_library() if entry == STANDARD_LIBRARY else _of_path(entry, base or Path.cwd()):
            found.setdefault(source.path, source)
    return tuple(found.values())


def fingerprint(sources: Sequence[Source]) -> str:
    """64 hex digits that change with a path, a size, a time of modification or the order: cheap, it reads no text."""
    digest = hashlib.sha256()
    for source in sources:
        digest.update(f"{source.bytes} {source.modified_ns} {source.path}\n".encode(errors="surrogateescape"))
    return digest.hexdigest()


def _standard_library() -> list[Source]:
    """Python's own sources without its tests, which not every system installs, and without what the build generated."""
    root = Path(sysconfig.get_path("stdlib"))
    chosen = [
        path
        for path in _walk(root, skip=_NOT_OUR_TEXT)
        if path.suffix == ".py" and not path.name.startswith(_MACHINE_DEPENDENT)
    ]
    sources = [source for path in chosen if (source := _look_at(path)).bytes]
    if not sources:
        raise DataError(
            f"data.text: {STANDARD_LIBRARY!r} has no sources in {root} on this machine; name files or directories of text instead"
        )
    return sources


def _of_path(entry: str, base: Path) -> list[Source]:
    path = Path(os.path.abspath(base / os.path.expanduser(entry)))  # noqa: PTH100, PTH111  # resolve() follows links; Path's raises
    if not path.exists():
        raise DataError(f"data.text: {entry}: there is no such file or directory (looked for {path}); correct the path")
    if not path.is_dir():
        source = _look_at(path)
        _require_readable(path)
        if not source.bytes:
            raise DataError(f"data.text: {path} is empty; name a file that has text")
        return [source]
    sources = [source for file in _walk(path) if (source := _look_at(file)).bytes and _is_text(file)]
    if not sources:
        raise DataError(
            f"data.text: the directory {path} has no text (hidden, empty and binary files are left out); name one that has"
        )
    return sources


def _walk(root: Path, skip: frozenset[str] = frozenset()) -> Iterator[Path]:
    """The files under a directory by rising path; links to directories are not followed, so there are no circles."""

    def refuse(error: OSError) -> None:
        with reading(error.filename):
            raise error

    chosen: list[Path] = []
    for folder, folders, files in os.walk(root, onerror=refuse):
        folders[:] = [name for name in folders if not name.startswith(".") and name not in skip]
        chosen += [Path(folder, name) for name in files if not name.startswith(".")]
    return iter(sorted((path for path in chosen if path.is_file()), key=lambda path: path.relative_to(root).parts))


def _look_at(path: Path) -> Source:
    with reading(path):
        require_regular(path)
        status = path.stat()
    return Source(path=path, bytes=status.st_size, modified_ns=status.st_mtime_ns)


def _is_text(path: Path) -> bool:
    head = _require_readable(path)
    return head.startswith(_BYTE_ORDER_MARKS) or b"\0" not in head


def _require_readable(path: Path) -> bytes:
    """The first bytes of the file. Raises DataError."""
    with reading(path), open_regular(path) as file:
        return file.read(_PROBE_BYTES)


@contextmanager
def reading(path: Path | str) -> Iterator[None]:
    """Raise DataError, with the path, if it cannot be read in the block."""
    try:
        yield
    except OSError as error:
        raise DataError(f"data.text: {path} cannot be read ({error.strerror}); grant access or leave it out") from error


_LONGEST = 2**28


@dataclass(frozen=True, kw_only=True, eq=False)
class TextFiles:
    """Each file is a document."""

    sources: Sequence[Source]

    def __len__(self) -> int:
        return len(self.sources)

    def __getitem__(self, index: int) -> str:
        path = self.sources[index].path
        with reading(path):
            return read_text(path, most_bytes=2**30, errors="replace")


@dataclass(frozen=True, kw_only=True, eq=False)
class JsonLines:
    """Each line that is not empty is a document; they are found by number, so that no file is held in memory.

    Args:
        field: which holds the text.
    """

    sources: Sequence[Source]
    field: str

    @cached_property
    def _places(self) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """File, byte and line of each document."""
        found: list[tuple[int, int, int]] = []
        for number, source in enumerate(self.sources):
            begin = 0
            with open_regular(source.path) as file:
                for line, content in enumerate(iter(partial(file.readline, _LONGEST + 1), b""), 1):
                    if len(content) > _LONGEST:
                        raise DataError(
                            f"{source.path}:{line}: this line has more than {_LONGEST:,} bytes: a document is a line"
                        )
                    if content.strip():
                        found.append((number, begin, line))
                    begin += len(content)
        files, begins, lines = np.asarray(found, dtype=np.int64).reshape(-1, 3).T
        return files, begins, lines

    def __len__(self) -> int:
        return len(self._places[0])

    def __iter__(self) -> Iterator[str]:
        return (self[index] for index in range(len(self)))

    def __getitem__(self, index: int) -> str:
        """Raises DataError with file and line if it is no JSON object, or has no such text."""
        number, begin, line = (int(values[index]) for values in self._places)
        path = self.sources[number].path
        with open_regular(path) as file:
            file.seek(begin)
            return _text_of(file.readline(), self.field, path, line)


def _text_of(content: bytes, field: str, path: Path, line: int) -> str:
    try:
        document = parse_json(content.decode("utf-8"))
    except ValueError as error:
        raise DataError(f"{path}:{line}: this line is not JSON: {error}") from error
    text = document.get(field) if isinstance(document, dict) else None
    if not isinstance(text, str):
        fields = ", ".join(document) if isinstance(document, dict) else "none"
        raise DataError(f"{path}:{line}: there is no text in the field {field!r} (it has {fields}): set data.field")
    return text


@dataclass(frozen=True, kw_only=True, eq=False)
class PaddedDocuments:
    """One document a sample: cut to ``length`` tokens, or filled up to it. What is filled up counts in no loss.

    A sample has ``input_ids``, ``attention_mask`` and ``labels``, int64 [length].
    """

    documents: TextFiles | JsonLines
    tokenizer: Any
    length: int

    def __len__(self) -> int:
        return len(self.documents)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        ids = self.tokenizer(self.documents[index], verbose=False)["input_ids"][: self.length]
        missing = self.length - len(ids)
        padding = self.tokenizer.pad_token_id
        fill = padding if padding is not None else self.tokenizer.eos_token_id or 0
        return {
            "input_ids": torch.tensor([*ids, *[fill] * missing]),
            "attention_mask": torch.tensor([*[1] * len(ids), *[0] * missing]),
            "labels": torch.tensor([*ids, *[-100] * missing]),
        }

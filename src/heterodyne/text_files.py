"""Files that are read with a bound and written whole or not at all.

Whatever a person or a stranger names as a file is opened here. Opening a pipe that nobody writes to waits forever, and a device may have
no end, so only regular files are read.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, Final

__all__ = [
    "open_regular",
    "read_bytes",
    "read_text",
    "replacing",
    "require_regular",
    "require_regular_in",
    "write_text",
]

MOST_BYTES: Final = 2**28
"""A file that is larger is none that a person wrote, or this library for them."""

_KINDS: Final = {
    stat.S_IFIFO: "a pipe (FIFO)", stat.S_IFCHR: "a device", stat.S_IFBLK: "a device", stat.S_IFSOCK: "a socket",
}  # fmt: skip


def require_regular(path: Path | str) -> None:
    """Raises OSError for a path that is no regular file, before a library opens it."""
    try:
        mode = os.stat(path).st_mode  # noqa: PTH116  # a text is as good
    except ValueError as error:
        raise OSError(errno.EINVAL, f"no file has such a name ({error})", str(path)) from error
    _require_regular(mode, path)


def require_regular_in(directory: Path) -> None:
    """Raises OSError if anything in a directory is neither a regular file nor a directory, before a library opens what it finds there."""
    for path in directory.iterdir():
        if not path.is_dir() and path.exists():
            require_regular(path)


def open_regular(path: Path | str) -> BinaryIO:
    """A regular file, open for reading. Raises OSError."""
    require_regular(path)  # first, for opening a device may do something already
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | getattr(os, "O_NONBLOCK", 0))
    try:
        _require_regular(os.fstat(descriptor).st_mode, path)
        return os.fdopen(descriptor, "rb")
    except OSError:
        os.close(descriptor)
        raise


def read_bytes(path: Path | str, most_bytes: int = MOST_BYTES) -> bytes:
    """The content of a regular file. Raises OSError, also for more than ``most_bytes``."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        # As much as there is, since room is made for what is asked for; a file of the system's own says that it has nothing.
        content = b"" if size > most_bytes else file.read(size or 2**20)
    if size > most_bytes:
        raise OSError(errno.EFBIG, f"it has more than {most_bytes:,} bytes", str(path))
    return content


def read_text(path: Path | str, *, most_bytes: int = MOST_BYTES, errors: str = "strict") -> str:
    """The content of a regular file in UTF-8. Raises OSError, also for more than ``most_bytes``, and UnicodeDecodeError."""
    return read_bytes(path, most_bytes).decode("utf-8", errors)


def _require_regular(mode: int, path: Path | str) -> None:
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not stat.S_ISREG(mode):
        kind = _KINDS.get(stat.S_IFMT(mode), "something else")
        raise OSError(errno.EINVAL, f"it is {kind}, and no regular file; name a file that holds the content", str(path))


@contextlib.contextmanager
def _named(path: Path) -> Iterator[None]:
    """Say which file an OSError of a write is about, which has none (a disk that is full)."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise


@contextlib.contextmanager
def replacing(path: Path, *, private: bool = False) -> Iterator[Path]:
    """Give the place to write a file: beside ``path``, whose place it takes at the end, so that an interrupted or failed write changes
    nothing.

    A link stays one. A device or a pipe, such as /dev/null, is written to and not replaced. ``private``: nobody but its owner can read the
    file. Raises OSError.
    """
    # /dev/stdout may be a file, which whoever opened it goes on writing to.
    if path.exists() and (not path.is_file() or path.absolute().is_relative_to("/dev")):
        if path.is_fifo():
            os.close(os.open(path, os.O_WRONLY | os.O_NONBLOCK))  # where nobody reads, this fails in place of waiting
        with _named(path):
            yield path
        return
    target = Path(os.path.realpath(path))  # of a link to itself, resolve() raises no OSError
    partial = target.with_name(f"{target.name}.partial-{secrets.token_hex(4)}")
    try:
        if private:
            partial.touch(mode=0o600)
        with _named(path):
            yield partial
        if target.exists() and not private:
            shutil.copymode(target, partial)
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)


def write_text(path: Path, text: str, *, private: bool = False) -> None:
    """Write a file in UTF-8 by way of `replacing`. Raises OSError."""
    with replacing(path, private=private) as place:
        place.write_text(text, encoding="utf-8")

"""Files that are read with a bound and written whole or not at all."""

from __future__ import annotations

import contextlib
import errno
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Final

__all__ = ["read_text", "replacing", "write_text"]

MOST_BYTES: Final = 2**28
"""A device such as /dev/zero has no end, and a file of this size is none that belongs here."""


def read_text(path: Path, *, most_bytes: int = MOST_BYTES, errors: str = "strict") -> str:
    """The content of a file in UTF-8. Raises OSError, also for a file of more than ``most_bytes``, and UnicodeDecodeError."""
    with path.open("rb") as file:
        content = file.read(most_bytes + 1)
    if len(content) > most_bytes:
        raise OSError(errno.EFBIG, f"it has more than {most_bytes:,} bytes", str(path))
    return content.decode("utf-8", errors)


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Where to write a file: beside ``path``, whose place it takes at the end, so that an interrupted or failed write changes nothing.

    A link stays one. A device or a pipe, such as /dev/null, is written to and not replaced. Raises OSError.
    """
    # /dev/stdout may be a file, which whoever opened it goes on writing to.
    if path.exists() and (not path.is_file() or path.absolute().is_relative_to("/dev")):
        yield path
        return
    target = path.resolve()
    partial = target.with_name(f"{target.name}.partial-{secrets.token_hex(4)}")
    try:
        yield partial
        if target.exists():
            shutil.copymode(target, partial)
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Write a file in UTF-8 by way of `replacing`. Raises OSError."""
    with replacing(path) as place:
        place.write_text(text, encoding="utf-8")

"""Text files, read with a bound: a device such as /dev/zero has no end, and a file of that size is none that belongs here."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Final

__all__ = ["read_text"]

MOST_BYTES: Final = 2**28


def read_text(path: Path, *, most_bytes: int = MOST_BYTES, errors: str = "strict") -> str:
    """The content of a file in UTF-8. Raises OSError, also for a file of more than ``most_bytes``, and UnicodeDecodeError."""
    with path.open("rb") as file:
        content = file.read(most_bytes + 1)
    if len(content) > most_bytes:
        raise OSError(errno.EFBIG, f"it has more than {most_bytes:,} bytes", str(path))
    return content.decode("utf-8", errors)

"""One command at a time in a directory."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from heterodyne.errors import HeterodyneError

__all__ = ["occupied"]

_PATIENCE_S = 10.0  # what the workers of a run that was killed need to end
_PAUSE_S = 0.2


@contextmanager
def occupied(path: Path, *, option: str = "--run-dir", patience_s: float = _PATIENCE_S) -> Iterator[None]:
    """Hold a directory of runs. The hold ends with the process, however that ends, and leaves no file. ``option``: that chooses another.

    Where the system or its file system knows no locks, nothing is held. Raises HeterodyneError if another process holds it.
    """
    try:
        import fcntl

        descriptor = os.open(path, os.O_RDONLY)
    except (ImportError, OSError):
        yield
        return
    try:
        deadline = time.monotonic() + patience_s
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise HeterodyneError(
                        f"another run is at work in {path}: wait until it ends, stop it, or choose another {option}"
                    ) from None
                time.sleep(_PAUSE_S)
                continue
            except OSError:
                pass  # a file system without locks
            break
        yield
    finally:
        os.close(descriptor)

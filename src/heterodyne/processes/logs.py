"""Where the logs of a run are that says nothing of a place for them: a temporary directory, which stays if the run fails.

Those of earlier runs are cleared but for the latest few, so that a machine that fails every night does not fill its disk with them.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

__all__ = ["temporary_logs"]

_PREFIX = "heterodyne-logs-"
_ALIVE = "alive"  # held by the launcher while it lives
_KEPT = 8
_UNHELD_S = 24 * 3600.0  # how long one stays that nobody has ever held: it may be just being made


@contextmanager
def temporary_logs() -> Iterator[Path]:
    """A new directory, which counts as in use while the block runs. The caller removes it."""
    directory = Path(tempfile.mkdtemp(prefix=_PREFIX))
    with (directory / _ALIVE).open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        _clear(directory.parent)
        yield directory


def _clear(parent: Path) -> None:
    """Remove our own directories there that no launcher uses, but for the latest."""
    found: list[tuple[float, Path]] = []
    with suppress(OSError):  # of another user, or just being removed by another launcher
        for path in parent.glob(f"{_PREFIX}*"):
            with suppress(OSError):
                status = path.lstat()
                if path.is_dir() and not path.is_symlink() and status.st_uid == os.getuid() and not _in_use(path):
                    found.append((status.st_mtime, path))
    for _, path in sorted(found, reverse=True)[_KEPT:]:
        shutil.rmtree(path, ignore_errors=True)


def _in_use(directory: Path) -> bool:
    try:
        with (directory / _ALIVE).open("r") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return False
    except FileNotFoundError:
        return time.time() - directory.stat().st_mtime < _UNHELD_S
    except BlockingIOError:
        return True

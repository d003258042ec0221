"""One run at a time in a run directory, and one directory for all ranks of a run."""

from __future__ import annotations

import os
import secrets
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from heterodyne.errors import HeterodyneError
from heterodyne.run_directory import RunDirectory
from heterodyne.runtime.comm.agreement import Agreement

__all__ = ["occupied", "require_shared"]

_PATIENCE_S = 10.0  # what the workers of a run that was killed need to end
_PAUSE_S = 0.2
_SHARED_WITHIN_S = 5.0


def require_shared(run: RunDirectory, agreement: Agreement) -> None:
    """Raise HeterodyneError, on every rank, if a rank does not see the directory as rank 0 does: all ranks write checkpoints there."""
    if agreement.size == 1:
        return

    def write() -> Path:
        sign = run.path / f".seen-by-all-{secrets.token_hex(8)}"
        sign.touch()
        return sign

    sign = agreement.on_rank0(write)

    def see() -> None:
        until_s = time.monotonic() + _SHARED_WITHIN_S  # network file systems keep for a while what was not there
        while not (run.path.is_dir() and sign in run.path.iterdir()):
            if time.monotonic() > until_s:
                raise HeterodyneError(
                    f"the run directory {run.path.absolute()} on the host {socket.gethostname()} (rank {agreement.rank}) is not that of "
                    "rank 0, and all ranks write checkpoints there: choose one on a disk that all hosts share"
                )
            time.sleep(0.1)

    try:
        agreement.gather_or_raise(see)
    finally:
        if agreement.rank == 0:
            with suppress(OSError):
                sign.unlink()


@contextmanager
def occupied(path: Path, *, patience_s: float = _PATIENCE_S) -> Iterator[None]:
    """Hold a run directory. The hold ends with the process, however that ends, and leaves no file.

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
                        f"another run is at work in {path}: wait until it ends, stop it, or choose another --run-dir"
                    ) from None
                time.sleep(_PAUSE_S)
                continue
            except OSError:
                pass  # a file system without locks
            break
        yield
    finally:
        os.close(descriptor)

"""The secret of runs whose launcher gives them none: a file that only the user of the workers can read."""

from __future__ import annotations

import os
import secrets
import stat
from contextlib import suppress
from pathlib import Path

from heterodyne.errors import WorkerError
from heterodyne.runtime.rendezvous.environment import SECRET_VARIABLE

__all__ = ["secret_of_user"]


def secret_of_user() -> str:
    """What all workers have who are of one user and see the same home directory; made when it is first asked for.

    It is in ``$XDG_STATE_HOME/heterodyne/secret``, or under ``~/.local/state``.

    Raises:
        WorkerError: the file cannot be made or read, or others can read it too.
    """
    base = os.environ.get("XDG_STATE_HOME")
    path = (Path(base) if base else Path.home() / ".local" / "state") / "heterodyne" / "secret"
    try:
        if not path.exists():
            _make(path)
        with path.open(encoding="ascii") as file:
            told, secret = os.fstat(file.fileno()), file.read(1024)
    except (OSError, ValueError) as error:
        raise WorkerError(f"{path} cannot be made or read ({error}): {_REMEDY}") from error
    if told.st_uid != os.geteuid() or stat.S_IMODE(told.st_mode) & 0o077 or len(secret) < 32:
        raise WorkerError(f"{path} is no file that only its owner can read: remove it, or {_REMEDY}")
    return secret


_REMEDY = (
    f"set {SECRET_VARIABLE} to one long random text for all workers, for example what `openssl rand -hex 32` prints"
)


def _make(path: Path) -> None:
    """Of several processes that do it at once, one is the first, and all read what that one has written."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"secret.partial-{secrets.token_hex(4)}")
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "w") as file:
            file.write(secrets.token_hex(32))
        with suppress(FileExistsError):
            os.link(partial, path)
    finally:
        partial.unlink()

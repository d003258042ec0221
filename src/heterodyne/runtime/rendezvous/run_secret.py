"""How two ends of a connection prove that both know the run's secret, without sending it.

Challenge and response with HMAC-SHA256, mutual: each end sends 32 random bytes, the client its rank too, and the MAC of both ends' bytes,
under a label of its role, so that no answer can be sent back or used again. Messages have fixed lengths. What follows is not encrypted.
"""

from __future__ import annotations

import asyncio
import hmac
import os
import secrets
import stat
from contextlib import suppress
from pathlib import Path

from heterodyne.errors import WorkerError
from heterodyne.runtime.rendezvous.environment import SECRET_VARIABLE

__all__ = ["GREETING", "HandshakeError", "SecretError", "SilentError", "as_client", "as_server", "secret_of_user"]

GREETING = b"heterodyne store 2\n"
_NONCE = 32
_RANK = 4
_MAC = 32


class HandshakeError(Exception):
    """The other end is no program of this library, or it gave up."""


class SilentError(HandshakeError):
    """Nothing is there: not even a port that is closed."""


class SecretError(HandshakeError):
    """The other end has another secret."""


async def as_server(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, secret: bytes) -> tuple[int, bytes]:
    """Let in who knows the secret; return its rank, and a key that only the two ends of this connection have. Raises HandshakeError."""
    own = secrets.token_bytes(_NONCE)
    writer.write(GREETING + own)
    answer = await _exactly(reader, _NONCE + _RANK + _MAC)
    theirs, proof = answer[:-_MAC], answer[-_MAC:]
    if not hmac.compare_digest(proof, mac(secret, b"client", own, theirs)):
        raise SecretError("it has another secret")
    writer.write(mac(secret, b"server", own, theirs))
    await writer.drain()
    return int.from_bytes(theirs[_NONCE:], "big"), mac(secret, b"key", own, theirs)


async def as_client(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, secret: bytes, rank: int) -> bytes:
    """Show that this end knows the secret, make sure that the other one does, and return the key of `as_server`. Raises HandshakeError."""
    greeting = await _exactly(reader, len(GREETING) + _NONCE)
    if not greeting.startswith(GREETING):
        raise HandshakeError("what listens there is another program")
    theirs, own = greeting[len(GREETING) :], secrets.token_bytes(_NONCE) + rank.to_bytes(_RANK, "big")
    writer.write(own + mac(secret, b"client", theirs, own))
    try:
        proof = await _exactly(reader, _MAC)
    except HandshakeError:
        raise SecretError("it refused the secret") from None
    if not hmac.compare_digest(proof, mac(secret, b"server", theirs, own)):
        raise SecretError("it has another secret")
    return mac(secret, b"key", theirs, own)


def mac(secret: bytes, role: bytes, server: bytes, client: bytes) -> bytes:
    """The proof of one end: 32 bytes that only who knows the secret can make for what both have sent."""
    return hmac.digest(secret, role + b"\0" + server + client, "sha256")


async def _exactly(reader: asyncio.StreamReader, count: int) -> bytes:
    try:
        return await reader.readexactly(count)
    except (asyncio.IncompleteReadError, OSError) as error:
        raise HandshakeError("it closed the connection") from error


def secret_of_user() -> str:
    """Return what all workers have who are of one user and see the same home directory; made when it is first asked for.

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
    """Make the file: where several processes do it at once, all read what the first has written."""
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

"""Messages between sites: a head of plain JSON values and rows of bytes behind it, signed with the key of their connection.

Nothing is pickled, and nothing is allocated or read before the signature of its length is verified. They are not encrypted.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from heterodyne.runtime.rendezvous.run_secret import SecretError

__all__ = ["STALLED_S", "Message", "read_message", "write_message"]

_HEAD = struct.Struct("<QQ32s32s")  # bytes of the head, of all that follows, their digest, the signature
_PIECE = 2**20
STALLED_S = 60.0
"""A connection on which a MiB takes longer is cut."""


@dataclass(frozen=True)
class Message:
    """``head``: plain JSON values by name. ``rows``: the bytes that go with it."""

    head: dict[str, Any]
    rows: Sequence[bytes] = ()


async def write_message(writer: asyncio.StreamWriter, message: Message, key: bytes, sender: str) -> int:
    """Send a message, the only one of this ``sender`` on the connection; return its bytes. Raises OSError and TimeoutError."""
    head = json.dumps({**message.head, "rows": [len(row) for row in message.rows]}).encode()
    body = b"".join([head, *message.rows])
    digest = hashlib.sha256(body).digest()
    data = _HEAD.pack(len(head), len(body), digest, _signature(key, sender, len(head), len(body), digest)) + body
    for start in range(0, len(data), _PIECE):
        writer.write(data[start : start + _PIECE])
        async with asyncio.timeout(STALLED_S):
            await writer.drain()
    return len(data)


async def read_message(
    reader: asyncio.StreamReader, key: bytes, sender: str, *, within_s: float = STALLED_S
) -> tuple[Message, int]:
    """Read the message of that sender, which begins to come within so many seconds; and its bytes.

    Raises SecretError if it is not of who knows the secret, OSError, EOFError and TimeoutError where the connection ends or stalls.
    """
    async with asyncio.timeout(within_s):
        first = await reader.readexactly(_HEAD.size)
    of_head, length, digest, signature = _HEAD.unpack(first)
    if not hmac.compare_digest(signature, _signature(key, sender, of_head, length, digest)):
        raise SecretError("what came is not signed with the secret of this run")
    body = bytearray()
    while len(body) < length:
        async with asyncio.timeout(STALLED_S):
            body += await reader.readexactly(min(_PIECE, length - len(body)))
    if not hmac.compare_digest(hashlib.sha256(body).digest(), digest):
        raise SecretError("what came is not what was signed")
    head = json.loads(bytes(body[:of_head]))
    rows, at = [], of_head
    for size in head.pop("rows"):
        rows.append(bytes(body[at : at + size]))
        at += size
    return Message(head, rows), _HEAD.size + length


def _signature(key: bytes, sender: str, of_head: int, length: int, digest: bytes) -> bytes:
    return hmac.digest(key, f"{sender}\0{of_head}\0{length}\0".encode() + digest, "sha256")

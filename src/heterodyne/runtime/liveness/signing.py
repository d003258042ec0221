"""Entries of a store that only who knows the run's secret can write.

A launcher's store is open to anybody. Strangers may delete what is there, but an address, a failure or a heartbeat that they write is not
believed.
"""

from __future__ import annotations

import hmac
from collections.abc import Sequence
from datetime import timedelta

from torch.distributed.distributed_c10d import Store

__all__ = ["SignedStore"]

_DIGITS = 64  # of a MAC in hexadecimal


class SignedStore:
    """A connection of its own to a store, whose entries carry a MAC of their key and value.

    Args:
        secret: of the run.
    """

    def __init__(self, store: Store, secret: bytes, *, timeout_s: float) -> None:
        self._store = store.clone()  # type: ignore[attr-defined]  # torch's stubs do not declare it
        self._store.set_timeout(timedelta(seconds=timeout_s))
        self._secret = secret
        self._there: set[str] = set()
        self.forged = 0

    def set(self, key: str, value: str) -> None:
        self._store.set(key, self._signed(key, value))

    def get(self, key: str) -> str | None:
        """Return what was signed under a key; None where there is nothing, or something that this run has not signed."""
        return self.get_all([key])[0]

    def get_all(self, keys: Sequence[str]) -> list[str | None]:
        self._there |= {key for key in keys if key not in self._there and self._store.check([key])}
        there = [key for key in keys if key in self._there]
        found = dict(zip(there, self._store.multi_get(there), strict=True)) if there else {}
        return [self._verified(key, found[key]) if key in found else None for key in keys]

    def set_first(self, key: str, value: str) -> str:
        """The value that was signed under the key first; a forged one is replaced."""
        held = self._verified(key, self._store.compare_set(key, "", self._signed(key, value)))
        if held is None:
            self.set(key, value)
        return value if held is None else held

    def _signed(self, key: str, value: str) -> str:
        return hmac.digest(self._secret, f"{key}\0{value}".encode(), "sha256").hex() + value

    def _verified(self, key: str, entry: bytes) -> str | None:
        text = entry.decode("utf-8", "replace")
        value = text[_DIGITS:]
        if hmac.compare_digest(text.encode(), self._signed(key, value).encode()):
            return value
        self.forged += 1
        return None

"""A cache for results that are asked for repeatedly, and are too many or too large to keep all."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

__all__ = ["BoundedCache"]

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")


class BoundedCache(Generic[Key, Value]):
    """Values by key; when there would be more than ``most``, all are dropped: by default about what a round of local search asks for."""

    def __init__(self, most: int = 1024) -> None:
        self._most = most
        self._known: dict[Key, Value] = {}

    def get(self, key: Key, make: Callable[[], Value]) -> Value:
        """The cached value, or else ``make()``, which is then cached."""
        if key not in self._known:
            made = make()
            if len(self._known) >= self._most:
                self._known.clear()
            self._known[key] = made
        return self._known[key]

"""Results that are asked for again and again, and too many or too large to keep all of them."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

__all__ = ["Kept"]

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")


class Kept(Generic[Key, Value]):
    """By what they are of; where there would be more than ``most``, all are forgotten."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._known: dict[Key, Value] = {}

    def get(self, key: Key, make: Callable[[], Value]) -> Value:
        """What is known, or else made now."""
        if key not in self._known:
            made = make()
            if len(self._known) >= self._most:
                self._known.clear()
            self._known[key] = made
        return self._known[key]

"""The cache with a bound."""

from __future__ import annotations

import pytest

from heterodyne.recent import Recent


def test_what_was_not_asked_for_the_longest_goes_first() -> None:
    made: list[int] = []

    def value(key: int) -> int:
        made.append(key)
        return -key

    kept: Recent[int, int] = Recent(2)
    for key in (1, 2, 1, 3, 1, 2, 3):
        assert kept.get(key, lambda key=key: value(key)) == -key
        assert len(kept) <= 2
    assert made == [1, 2, 3, 2, 3]


def test_what_cannot_be_made_takes_the_place_of_nothing() -> None:
    kept: Recent[str, float] = Recent(1)
    kept.get("one", lambda: 1.0)
    with pytest.raises(ZeroDivisionError):
        kept.get("none", lambda: 1 / 0)
    assert "one" in kept
    assert "none" not in kept

"""What several ranks have to tell is told once."""

from __future__ import annotations

from heterodyne.measure.notes import told_once, words_of

DEVICES = ("a", "b", "c")


def test_the_same_note_of_several_devices_is_one() -> None:
    assert told_once(DEVICES, [["x"], ["y", "x"], ["z"]]) == ["a, b: x", "b: y", "c: z"]
    assert told_once(DEVICES, [["x"], ["x"], ["x"]]) == ["all 3 devices: x"]
    assert told_once(("a",), [["x", "x"]]) == ["a: x"]
    assert told_once(DEVICES, [[], [], []]) == []


def test_an_error_in_one_line() -> None:
    assert words_of(ValueError("a\nb")) == "ValueError: a"
    assert words_of(KeyError()) == "KeyError"

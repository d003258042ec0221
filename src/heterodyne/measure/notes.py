"""What ranks have to tell people, said once however many of them say it."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["told_once", "words_of"]


def told_once(devices: Sequence[str], notes: Sequence[Sequence[str]]) -> list[str]:
    """Each distinct note with the devices that it is about before it, in the order in which notes first appear.

    Args:
        devices: the name of each rank's device.
        notes: of each rank.
    """
    about: dict[str, list[str]] = {}
    for device, own in zip(devices, notes, strict=True):
        for note in own:
            about.setdefault(note, []).append(device)
    everyone = len(devices)
    return [
        f"all {everyone} devices: {note}"
        if 1 < everyone == len(set(who))
        else f"{', '.join(dict.fromkeys(who))}: {note}"
        for note, who in about.items()
    ]


def words_of(error: Exception) -> str:
    """The type of an error and the first line of what it says."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__

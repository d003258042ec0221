"""The colours of action kinds and of series, one set on light ground and one on dark.

The hues follow Okabe and Ito ("Color Universal Design", 2008), which people with any colour vision tell apart; those of one
step also differ in lightness, so that they survive a grey print. In a pipeline each stage has a hue of its own, the one of a series,
and the passes are shades of it: a forward is light, a backward full, a weight gradient dark, what is computed again pale.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Final

from heterodyne.timeline import Event

__all__ = [
    "DARK",
    "DARK_STAGES",
    "LIGHT",
    "SERIES",
    "STAGE_COLOURS",
    "Palette",
    "event_key",
    "has_stages",
    "kind_key",
    "stage_of",
]

SERIES: Final = 8
Palette = Mapping[str, str]

LIGHT: Final[Palette] = MappingProxyType(
    {
        "F": "#3b82c4", "B": "#e08e2b", "I": "#c9703a", "W": "#f0c05a", "R": "#8fb7dc", "REDUCE_GRAD": "#159a80",
        "SCATTER": "#159a80", "GATHER": "#0d6b8c", "UNSHARD": "#0d6b8c", "CLIP": "#b8a327", "STEP": "#a4588f",
        "SEND": "#6f7787", "RECV": "#c3c8d1", "OFFLOAD": "#8a8d2b", "RELOAD": "#a9ac4c",
        "exposed": "#8fd1c1", "idle": "#e4e6ea", "other": "#7b8494",
        "c0": "#2b74b8", "c1": "#d9822b", "c2": "#159a80", "c3": "#a4588f",
        "c4": "#c0504d", "c5": "#56a6d6", "c6": "#8a8d2b", "c7": "#6f7787",
    }
)  # fmt: skip
"""A colour for each action kind, for the parts ``exposed`` and ``idle``, for ``other``, and for the series ``c0`` to ``c7``."""

DARK: Final[Palette] = MappingProxyType(
    {
        "F": "#5aa2e4", "B": "#efa24a", "I": "#dd8a58", "W": "#f2cd78", "R": "#3f6d99", "REDUCE_GRAD": "#3bbfa3",
        "SCATTER": "#3bbfa3", "GATHER": "#2fa3cc", "UNSHARD": "#2fa3cc", "CLIP": "#d3c04f", "STEP": "#c682b4",
        "SEND": "#98a1b0", "RECV": "#4a5261", "OFFLOAD": "#bcbf5a", "RELOAD": "#8d9040",
        "exposed": "#23695b", "idle": "#2b313c", "other": "#8f99a8",
        "c0": "#5aa2e4", "c1": "#efa24a", "c2": "#3bbfa3", "c3": "#c682b4",
        "c4": "#e37c78", "c5": "#8cc8ee", "c6": "#bcbf5a", "c7": "#98a1b0",
    }
)  # fmt: skip


# How far each pass is from the hue of its stage: towards white above 0, towards black below.
_SHADES: Final = MappingProxyType({"F": 0.42, "B": 0.0, "I": 0.14, "W": -0.34, "R": 0.72})
_STAGE = re.compile(r"^[0-9]+")


def _shades(palette: Palette) -> Palette:
    return MappingProxyType(
        {
            f"{kind}{number}": _mixed(palette[f"c{number}"], amount)
            for number in range(SERIES)
            for kind, amount in _SHADES.items()
        }
    )


def _mixed(colour: str, amount: float) -> str:
    towards = 255 if amount > 0 else 0
    parts = (int(colour[at : at + 2], 16) for at in (1, 3, 5))
    return "#" + "".join(f"{round(part + abs(amount) * (towards - part)):02x}" for part in parts)


STAGE_COLOURS: Final[Palette] = _shades(LIGHT)
"""The passes of stages on light ground, as ``F0`` (a forward of stage 0); hues come again after the last one."""

DARK_STAGES: Final[Palette] = _shades(DARK)


def kind_key(kind: str) -> str:
    """The key of an action kind in a palette: itself, ``SEND`` or ``RECV`` for both directions, ``other`` without a colour of its own."""
    kind = kind.split("_")[0] if kind.startswith(("SEND_", "RECV_")) else kind
    return kind if kind in LIGHT and not kind.startswith("c") else "other"


def stage_of(name: str) -> int:
    """The stage in the name of an action: 1 of ``1F0``; 0 where there is none."""
    found = _STAGE.match(name)
    return int(found[0]) if found else 0


def has_stages(events: Iterable[Event]) -> bool:
    """Return whether there is more than one stage to tell apart."""
    return any(stage_of(event.name) > 0 for event in events)


def event_key(event: Event, *, by_stage: bool) -> str:
    """The key of an event: that of its kind, or of a pass in the hue of its stage."""
    if by_stage and event.kind in _SHADES:
        return f"{event.kind}{stage_of(event.name) % SERIES}"
    return kind_key(event.kind)

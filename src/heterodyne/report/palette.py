"""The colours of action kinds and of series, one set on light ground and one on dark.

The hues follow Okabe and Ito ("Color Universal Design", 2008), which people with any colour vision tell apart; those of one
step also differ in lightness, so that they survive a grey print.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

__all__ = ["DARK", "LIGHT", "SERIES", "Palette", "kind_key"]

SERIES: Final = 8
Palette = Mapping[str, str]

LIGHT: Final[Palette] = MappingProxyType(
    {
        "F": "#3b82c4", "B": "#e08e2b", "I": "#c9703a", "W": "#f0c05a", "R": "#8fb7dc", "REDUCE_GRAD": "#159a80",
        "CLIP": "#b8a327", "STEP": "#a4588f", "exposed": "#8fd1c1", "idle": "#e4e6ea", "other": "#7b8494",
        "c0": "#2b74b8", "c1": "#d9822b", "c2": "#159a80", "c3": "#a4588f",
        "c4": "#c0504d", "c5": "#56a6d6", "c6": "#8a8d2b", "c7": "#6f7787",
    }
)  # fmt: skip
"""A colour for each action kind, for the parts ``exposed`` and ``idle``, for ``other``, and for the series ``c0`` to ``c7``."""

DARK: Final[Palette] = MappingProxyType(
    {
        "F": "#5aa2e4", "B": "#efa24a", "I": "#dd8a58", "W": "#f2cd78", "R": "#3f6d99", "REDUCE_GRAD": "#3bbfa3",
        "CLIP": "#d3c04f", "STEP": "#c682b4", "exposed": "#23695b", "idle": "#2b313c", "other": "#8f99a8",
        "c0": "#5aa2e4", "c1": "#efa24a", "c2": "#3bbfa3", "c3": "#c682b4",
        "c4": "#e37c78", "c5": "#8cc8ee", "c6": "#bcbf5a", "c7": "#98a1b0",
    }
)  # fmt: skip


def kind_key(kind: str) -> str:
    """The key of an action kind in a palette: itself, or ``other`` for one without a colour of its own."""
    return kind if kind in LIGHT and not kind.startswith("c") else "other"

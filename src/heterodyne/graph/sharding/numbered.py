"""What the written graph of a stage in parts names by number, because the text of a graph cannot name it otherwise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

from heterodyne.graph.ir import Ref
from heterodyne.graph.sharding.layout import Layout

__all__ = ["Numbered", "Slot", "Step"]

Slot: TypeAlias = tuple[Ref, Layout]
"""A tensor as it is cut."""

Step: TypeAlias = tuple[Ref, Layout, Layout]
"""A tensor, how it lies, and how it is wanted."""


class Numbered(NamedTuple):
    """What the numbers stand for, in order."""

    slots: tuple[Slot, ...]
    steps: tuple[Step, ...]
    functions: tuple[Callable[..., Any], ...]

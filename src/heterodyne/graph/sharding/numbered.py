"""What the written graph of a sharded stage names by number, because the text of a graph cannot name it otherwise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

from heterodyne.graph.ir import Ref
from heterodyne.graph.sharding.layout import Layout
from heterodyne.graph.sharding.nested import Turn

__all__ = ["Numbered", "Slot", "Step"]

Slot: TypeAlias = tuple[int, Ref, Layout]
"""An axis, and a tensor as it is cut along it."""

Step: TypeAlias = tuple[Ref, Turn]
"""A tensor, and how it is laid out otherwise along one axis."""


class Numbered(NamedTuple):
    """What the numbers stand for, in order."""

    slots: tuple[Slot, ...]
    steps: tuple[Step, ...]
    functions: tuple[Callable[..., Any], ...]

"""What can stand in a cluster file or a fleet file: names, counts, sizes, bandwidths, and what several places in them have in common."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Literal, TypeAlias, TypeVar

from pydantic import AfterValidator, BeforeValidator, Field

from heterodyne.documents import Section
from heterodyne.units import parse_bandwidth, parse_bytes, parse_seconds

__all__ = [
    "CATALOG_LINK_LATENCY_S",
    "Backend",
    "Bandwidth",
    "Count",
    "DevicesEntry",
    "Latency",
    "LinkValues",
    "Memory",
    "Name",
    "some",
]

# Datasheets state no latency. The order of a copy between two GPUs of one node; whoever needs better measures it.
CATALOG_LINK_LATENCY_S = parse_seconds("10 us")

_BOUNDS: Mapping[str, tuple[float, float, str]] = {
    "memory": (2**20, 2**50, "1 MiB and 1 PiB"),
    "bandwidth": (1e3, 1e15, "1 kB/s and 1 PB/s"),
    "latency": (0, 60, "0 and 1 min"),
}
_NAME = re.compile(r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
_Item = TypeVar("_Item")


def _within(what: str, value: float, text: object) -> float:
    low, high, said = _BOUNDS[what]
    if not low <= value <= high:
        raise ValueError(f"{text!r} is no {what} between {said}; is the unit right?")
    return value


def _memory(text: str | float) -> int:
    return int(_within("memory", parse_bytes(text), text))


def _bandwidth(text: str | float) -> float:
    return _within("bandwidth", parse_bandwidth(text), text)


def _latency(text: str | float) -> float:
    return _within("latency", parse_seconds(text), text)


def _name(text: str) -> str:
    if not _NAME.match(text):
        raise ValueError(
            f"{text!r} is no name of a node or place; use letters, digits, '.', '_' and '-', as in 'gpu-box.3'"
        )
    return text


def some(items: tuple[_Item, ...]) -> tuple[_Item, ...]:
    """Refuses an empty list."""
    if not items:
        raise ValueError("is empty; a cluster needs at least one node, and a node at least one device")
    return items


Name: TypeAlias = Annotated[str, AfterValidator(_name)]
Count: TypeAlias = Annotated[int, Field(ge=1, le=100_000, strict=True)]
Memory: TypeAlias = Annotated[int, BeforeValidator(_memory)]
Bandwidth: TypeAlias = Annotated[float, BeforeValidator(_bandwidth)]
Latency: TypeAlias = Annotated[float, BeforeValidator(_latency)]
Backend: TypeAlias = Literal["cpu", "cuda", "xpu", "npu", "hpu", "xla", "mps"]


class LinkValues(Section):
    """What a link carries in one direction, and how long the first byte takes."""

    bandwidth: Bandwidth
    latency: Latency


class DevicesEntry(Section):
    """Alike devices of a node. ``memory`` and ``backend``: None asks the catalog."""

    kind: Annotated[str, Field(min_length=1)]
    count: Count = 1
    memory: Memory | None = None
    backend: Backend | None = None

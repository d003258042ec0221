"""Quantities as people write them: ``25 GB/s``, ``50 Gb/s``, ``10 us``, ``16 GiB``.

Inside the library every quantity is a plain number in a base unit (bytes, seconds, bytes per second), with the unit
in the name. Text with units exists only at the border, in the files that people write and the tables they read, and
this is where it is crossed.
"""

from __future__ import annotations

import math
import re

from heterodyne.errors import UnitError

__all__ = [
    "counted",
    "format_bandwidth",
    "format_bytes",
    "format_count",
    "format_seconds",
    "parse_bandwidth",
    "parse_bytes",
    "parse_seconds",
]

_QUANTITY = re.compile(r"^\s*([0-9][0-9_]*\.?[0-9]*(?:[eE][+-]?[0-9]+)?)\s*([A-Za-zµ/]*)\s*$")

_DECIMAL = {"": 1, "k": 10**3, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "P": 10**15}
_BINARY = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40, "Pi": 2**50}
_BYTES = {f"{prefix}B": float(size) for prefix, size in (_DECIMAL | _BINARY).items()}
_BANDWIDTHS = {f"{unit}/s": size for unit, size in _BYTES.items()} | {
    f"{prefix}{bit}{per}": size / 8
    for prefix, size in _DECIMAL.items()
    for bit, per in (("b", "/s"), ("bit", "/s"), ("b", "ps"), ("bps", ""))
}
_SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9, "min": 60.0, "h": 3600.0}


def parse_bytes(text: str | float) -> int:
    """Bytes of ``16 GiB``, ``80 GB`` or a bare number. Raises UnitError."""
    return round(_parse(text, _BYTES, bare=1.0, what="a size", example="16 GiB"))


def parse_bandwidth(text: str | float) -> float:
    """Bytes per second of ``25 GB/s`` or ``50 Gb/s`` (bits). A unit is needed. Raises UnitError."""
    return _parse(text, _BANDWIDTHS, bare=None, what="a bandwidth", example="25 GB/s")


def parse_seconds(text: str | float) -> float:
    """Seconds of ``10 us`` or ``1.5 ms``. A unit is needed, except for 0. Raises UnitError."""
    return 0.0 if text in (0, "0") else _parse(text, _SECONDS, bare=None, what="a time", example="10 us")


def _parse(text: str | float, units: dict[str, float], *, bare: float | None, what: str, example: str) -> float:
    if isinstance(text, bool):
        raise UnitError(f"{text!r} is not {what}; write for example {example!r}")
    match = _QUANTITY.match(str(text))
    if match is None:
        raise UnitError(f"{text!r} is not {what}; write for example {example!r}")
    number, unit = float(match[1].replace("_", "")), match[2]
    scale = bare if unit == "" else units.get(unit)
    if scale is None:
        shown = f"has no unit that {what} can have" if unit else "has no unit"
        raise UnitError(f"{text!r} {shown}; write for example {example!r} (units: {', '.join(units)})")
    value = number * scale
    if not math.isfinite(value):
        raise UnitError(f"{text!r} is not finite")
    return value


def format_bytes(size: float) -> str:
    """``1.5 GiB``: binary prefixes, three significant digits."""
    for prefix, scale in reversed(_BINARY.items()):
        if abs(size) >= scale:
            return f"{size / scale:.3g} {prefix}B" if abs(size) < 1000 * scale else f"{size / scale:.0f} {prefix}B"
    return f"{size:.0f} B"


def format_bandwidth(bytes_per_s: float) -> str:
    """``25 GB/s``: decimal prefixes, as on datasheets."""
    return _decimal(bytes_per_s, "B/s")


def format_count(count: float) -> str:
    """``10.7 M``."""
    return _decimal(count, "").strip()


def counted(count: int, noun: str) -> str:
    """``1 device``, ``25,000 devices``."""
    return f"{count:,} {noun}{'s' * (count != 1)}"


def format_seconds(seconds: float) -> str:
    """``12.3 ms``, ``4.56 s``, ``1 h 02 min``."""
    if seconds >= 3600:
        return f"{int(seconds // 3600)} h {int(seconds % 3600 // 60):02d} min"
    if seconds >= 100:
        return f"{int(seconds // 60)} min {int(seconds % 60):02d} s"
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= scale:
            return f"{seconds / scale:.3g} {unit}"
    return "0 s" if seconds == 0 else f"{seconds / 1e-9:.3g} ns"


def _decimal(value: float, unit: str) -> str:
    for prefix, scale in reversed(_DECIMAL.items()):
        if prefix != "K" and abs(value) >= scale:
            return (
                f"{value / scale:.3g} {prefix}{unit}"
                if abs(value) < 1000 * scale
                else f"{value / scale:.0f} {prefix}{unit}"
            )
    return f"{value:.3g} {unit}"

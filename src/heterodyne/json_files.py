"""JSON files, read as strictly as this library writes them.

Python's own reader takes NaN and Infinity, lets the last of two equal keys win, and fails on deep nesting with RecursionError; what it
gives is of any shape. Here every fault is a ValueError that says what is wrong and where.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Final, TypeAlias, TypeVar, cast

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from heterodyne.text_files import read_text

__all__ = ["EXACT", "Count", "Seconds", "checked", "parse_json", "read_json", "readable_json"]

T = TypeVar("T")

MOST_BYTES: Final = 2**30

EXACT: Final = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
"""What a record that is written by this library says of itself, as ``__pydantic_config__``: no other key, type or infinite number."""

Count: TypeAlias = Annotated[int, Field(ge=0, le=2**63 - 1)]
Seconds: TypeAlias = Annotated[float, Field(ge=0)]


def read_json(path: Path | str, most_bytes: int = MOST_BYTES) -> Any:
    """The content of a file. Raises OSError, also for more than ``most_bytes``, and ValueError for what is no JSON."""
    return parse_json(read_text(path, most_bytes=most_bytes))


def parse_json(text: str) -> Any:
    """The value of a JSON text. Raises ValueError; json.JSONDecodeError, which is one, for a text that breaks off or has a wrong letter."""
    try:
        content = json.loads(text, object_pairs_hook=_once, parse_constant=_no_constant)
    except RecursionError as error:
        raise ValueError("not JSON that can be read: it is nested too deeply") from error
    if "\\ud" in text.lower():  # half a character, which no file or terminal takes
        json.dumps(content, ensure_ascii=False).encode("utf-8")
    return content


def checked(kind: type[T], content: object) -> T:
    """``content`` as a value of a dataclass, with every field of the type that it has there. Raises ValueError with each fault."""
    adapter: TypeAdapter[T] = _adapter(cast(Any, kind))
    try:
        return adapter.validate_json(
            json.dumps(content)
        )  # in JSON a tuple is a list, and a float may be a whole number
    except ValidationError as error:
        raise ValueError("; ".join(_words(fault) for fault in error.errors()[:3])) from error


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def _words(fault: Any) -> str:
    place = ".".join(map(str, fault["loc"]))
    message = str(fault["msg"]).removeprefix("Value error, ")
    return f"{place}: {message}" if place else message


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"the key {next(key for key in keys if keys.count(key) > 1)!r} is given twice")
    return found


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is no number of JSON")


def readable_json(value: object, *, width: int = 120, indent: int = 0) -> str:
    """JSON for people: what fits on a line of ``width`` characters stands on one."""
    flat = json.dumps(value, ensure_ascii=False)
    if indent + len(flat) <= width or not isinstance(value, dict | list) or not value:
        return flat
    inner = " " * (indent + 2)
    named = value.items() if isinstance(value, dict) else ((None, part) for part in value)
    parts = []
    for name, part in named:
        label = "" if name is None else f"{json.dumps(name, ensure_ascii=False)}: "
        parts.append(f"{inner}{label}{readable_json(part, width=width - len(label), indent=indent + 2)}")
    first, last = "{}" if isinstance(value, dict) else "[]"
    return first + "\n" + ",\n".join(parts) + "\n" + " " * indent + last

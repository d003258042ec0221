"""YAML that people write, read into typed values, with the line of whatever is wrong.

Pydantic says *which field* is wrong, PyYAML knows *on which line* each field stands; this module joins the two.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError

from heterodyne.errors import FileError

__all__ = ["Section", "read_yaml", "validate"]

Location = tuple[str | int, ...]


class Section(BaseModel):
    """A part of a file that a person writes: immutable, and a key that it does not know is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid")


Document = TypeVar("Document", bound=BaseModel)


def read_yaml(path: Path, error: type[FileError]) -> tuple[Any, dict[Location, int]]:
    """The content of a YAML file, and the line of each key and item in it. Raises ``error``."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as failure:
        reason = failure.strerror if isinstance(failure, OSError) else "it is not UTF-8 text"
        raise error(f"cannot be read: {reason}", path=str(path)) from failure
    try:
        loader = yaml.SafeLoader(text)
        node = loader.get_single_node()
        if node is None:
            raise error("is empty", path=str(path))
        lines: dict[Location, int] = {}
        _number(node, (), lines, path, error)
        return loader.construct_document(node), lines
    except ValueError as failure:  # a value that looks like a date and is none
        raise error(f"not YAML: {failure}", path=str(path)) from failure
    except RecursionError as failure:
        raise error("an alias (*) refers to what it stands in", path=str(path)) from failure
    except yaml.YAMLError as failure:
        mark = getattr(failure, "problem_mark", None)
        problem = getattr(failure, "problem", None) or str(failure)
        raise error(f"not YAML: {problem}", path=str(path), line=mark.line + 1 if mark else None) from failure


def validate(
    document: type[Document],
    content: object,
    *,
    error: type[FileError],
    path: str | None = None,
    lines: Mapping[Location, int] | None = None,
    overrides: Mapping[Location, str] | None = None,
) -> Document:
    """``content`` as a ``document``. Raises ``error`` with the line of the first fault and the text of all of them.

    ``overrides``: for each place that was not filled from the file, what filled it, in words; a fault there is told with them.
    """
    try:
        return document.model_validate(content)
    except ValidationError as failure:
        faults: list[tuple[int | None, str]] = []
        elsewhere: list[str] = []
        for fault in failure.errors():
            text, by = _say(fault, document), _override(fault["loc"], overrides or {}, lines or {})
            if by is None:
                faults.append((_line(fault["loc"], lines or {}), text))
            else:
                elsewhere.append(f"{by}: {text}")
        faults.sort(key=lambda f: f[0] or 0)
        if not faults:
            raise error("\n  ".join(elsewhere)) from failure
        first, message = faults[0]
        rest = [f"line {line}: {text}" if line else text for line, text in faults[1:]]
        raise error("\n  ".join([message, *rest, *elsewhere]), path=path, line=first) from failure


def _number(node: yaml.Node, at: Location, lines: dict[Location, int], path: Path, error: type[FileError]) -> None:
    """Record the line of every key and item; refuse a key given twice, which YAML would silently let win."""
    lines.setdefault(at, node.start_mark.line + 1)
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            here = (*at, str(key.value))
            if here in lines:
                raise error(
                    f"{key.value!r} is given twice (first on line {lines[here]})",
                    path=str(path),
                    line=key.start_mark.line + 1,
                )
            lines[here] = key.start_mark.line + 1
            _number(value, here, lines, path, error)
    elif isinstance(node, yaml.SequenceNode):
        for index, value in enumerate(node.value):
            _number(value, (*at, index), lines, path, error)


def _line(at: Sequence[str | int], lines: Mapping[Location, int]) -> int | None:
    """The line of a field, or of the nearest thing around it that has one."""
    place = tuple(at)
    while place not in lines and place:
        place = place[:-1]
    return lines.get(place)


def _override(at: Location, overrides: Mapping[Location, str], lines: Mapping[Location, int]) -> str | None:
    """What filled the place, something around it, or all that there is in it, if it was not the file."""
    around = (place for place in overrides if at[: len(place)] == place)
    inside = (place for place in overrides if place[: len(at)] == at and at not in lines)
    return next((overrides[place] for place in (*around, *inside)), None)


def _say(fault: Any, document: type[BaseModel]) -> str:
    place = ".".join(str(part) for part in fault["loc"])
    if fault["type"] == "extra_forbidden":
        known = _keys(document, fault["loc"][:-1])
        close = get_close_matches(str(fault["loc"][-1]), known, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else f"; it can be: {', '.join(known)}" if known else ""
        return f"{place}: there is no such key{hint}"
    if fault["type"] == "missing":
        return f"{place}: is missing"
    message = str(fault["msg"]).removeprefix("Value error, ")
    return f"{place}: {message}" if place else message


def _keys(document: Any, at: Sequence[str | int]) -> list[str]:
    """The keys that the section at that place can have; none if it cannot be told."""
    for part in at:
        if isinstance(part, int):
            continue
        field = getattr(document, "model_fields", {}).get(part)
        if field is None:
            continue
        candidates = [field.annotation, *getattr(field.annotation, "__args__", ())]
        inner = [a for c in candidates for a in (c, *getattr(c, "__args__", ()))]
        document = next((c for c in inner if isinstance(c, type) and issubclass(c, BaseModel)), None)
        if document is None:
            return []
    return list(getattr(document, "model_fields", {}))

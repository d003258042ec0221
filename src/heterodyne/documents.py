"""YAML that people write, read into typed values, with the line of whatever is wrong.

Pydantic says *which field* is wrong, PyYAML knows *on which line* each field stands; this module joins the two.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, TypeAlias, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator

from heterodyne.errors import FileError
from heterodyne.text_files import read_text
from heterodyne.yaml_text import Location, YamlFaultError, parse_yaml

__all__ = ["Location", "Section", "Whole", "read_yaml", "validate"]

_MOST_BYTES = 2**20
_MOST_FAULTS, _MOST_LETTERS = 20, 600

Whole: TypeAlias = Annotated[int, Field(ge=0, le=2**31 - 1)]
"""A number of things, which fits wherever it is passed on to."""


class Section(BaseModel):
    """A part of a file that a person writes: immutable, and a key that it does not know is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _no_truth_value_for_a_number(cls, value: Any, field: ValidationInfo) -> Any:
        """Pydantic takes ``yes`` for 1, so that ``steps: yes`` would be one step."""
        kinds = _kinds(cls.model_fields[str(field.field_name)].annotation)
        values = value if isinstance(value, list | tuple) else (value,)
        if kinds & {int, float} and not kinds & {bool, Any} and any(isinstance(each, bool) for each in values):
            raise ValueError("a truth value (true, yes, on) is no number")
        return value


Document = TypeVar("Document", bound=BaseModel)


def _kinds(annotation: Any) -> set[Any]:
    """The types that an annotation is put together from."""
    inner = get_args(annotation)
    if not inner:
        return {annotation} if isinstance(annotation, type) or annotation is Any else set()
    return {kind for each in inner for kind in _kinds(each)}


def read_yaml(path: Path | str, error: type[FileError]) -> tuple[Any, dict[Location, int]]:
    """The content of a YAML file, and the line of each key and item in it. Raises ``error``."""
    try:
        text = read_text(path, most_bytes=_MOST_BYTES)
    except (OSError, UnicodeDecodeError) as failure:
        reason = failure.strerror if isinstance(failure, OSError) else "it is not UTF-8 text"
        raise error(f"cannot be read: {reason}", path=str(path)) from failure
    try:
        content, lines = parse_yaml(text)
    except YamlFaultError as failure:
        raise error(str(failure), path=str(path), line=failure.line) from failure
    if not lines:
        raise error("is empty", path=str(path))
    return content, lines


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

    ``overrides``: for each place that was not filled from the file, what filled it, in words; a fault there is reported with them.
    """
    try:
        return document.model_validate(content)
    except ValidationError as failure:
        faults: list[tuple[int | None, str]] = []
        elsewhere: list[str] = []
        for fault in _by_place(failure.errors(), content):
            text, by = _say(fault, document), _override(fault["loc"], overrides or {}, lines or {})
            if by is None:
                faults.append((_line(fault["loc"], lines or {}), text))
            else:
                elsewhere.append(f"{by}: {text}")
        faults.sort(key=lambda f: f[0] or 0)
        if not faults:
            raise error("\n  ".join(elsewhere)) from failure
        first, message = faults[0]
        rest = [f"line {line}: {text}" if line else text for line, text in faults[1:_MOST_FAULTS]]
        if len(faults) > _MOST_FAULTS:
            rest.append(f"and {len(faults) - _MOST_FAULTS} more")
        raise error("\n  ".join([message, *rest, *elsewhere]), path=path, line=first) from failure


def _line(at: Sequence[str | int], lines: Mapping[Location, int]) -> int | None:
    """The line of a field, or of the nearest thing around it that has one."""
    place = tuple(at)
    while place not in lines and (*place[:-1], *map(str, place[-1:])) not in lines and place:  # a key may be a number
        place = place[:-1]
    return lines.get(place, lines.get((*place[:-1], *map(str, place[-1:]))))


def _override(at: Location, overrides: Mapping[Location, str], lines: Mapping[Location, int]) -> str | None:
    """Return what filled the place, something around it, or all that there is in it, if it was not the file."""
    around = (place for place in overrides if at[: len(place)] == place)
    inside = (place for place in overrides if place[: len(at)] == at and at not in lines)
    return next((overrides[place] for place in (*around, *inside)), None)


def _by_place(faults: Iterable[Any], content: object) -> list[Any]:
    """Return the faults, for a value that fits no branch of a union those of the branch that it nearly fits, with the words that it may be
    instead."""
    found: dict[Location, list[Any]] = {}
    for fault in faults:
        place = _without_branches(fault, content)
        found.setdefault(place, []).append({**fault, "loc": place})
    merged = []
    for value, of_value in found.items():
        literals = [fault for fault in of_value if fault["type"] == "literal_error"]
        others = [fault for fault in of_value if fault["type"] != "literal_error"]
        inside = any(len(place) > len(value) and place[: len(value)] == value for place in found)
        others = [fault for fault in others if not fault["type"].endswith("_type")] or ([] if inside else others)
        if literals and others:
            words = " or ".join(fault["ctx"]["expected"] for fault in literals)
            merged.append({**others[0], "msg": f"{others[0]['msg']}, or {words}"})
        else:
            merged += others or literals
    return merged


def _without_branches(fault: Any, content: object) -> Location:
    """Return where a fault is, without the names that pydantic gives to the branches of unions: no keys of the document."""
    place: list[str | int] = []
    for number, part in enumerate(fault["loc"]):
        inside = isinstance(content, Mapping) and part in content
        listed = isinstance(content, list | tuple) and isinstance(part, int) and part < len(content)
        if inside or listed:
            content = content[part]  # type: ignore[index]
        elif fault["type"] not in ("missing", "extra_forbidden") or number < len(fault["loc"]) - 1:
            continue  # of those two, the last part is the key that is missing or too many
        place.append(part)
    return tuple(place)


def _say(fault: Any, document: type[BaseModel]) -> str:
    place = ".".join(str(part) for part in fault["loc"])
    if fault["type"] == "extra_forbidden":
        known = _keys(document, fault["loc"][:-1])
        close = get_close_matches(str(fault["loc"][-1]), known, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else f"; it can be: {', '.join(known)}" if known else ""
        return f"{place}: there is no such key{hint}"
    if fault["type"] == "missing":
        return f"{place}: is missing"
    if fault["type"] in ("model_type", "dict_type"):
        keys = ", ".join(_keys(document, fault["loc"]))
        return f"{place}: takes a section, not a single value{f'; its keys can be: {keys}' if keys else ''}"
    if fault["type"] == "too_short":
        return f"{place}: takes at least {fault['ctx']['min_length']}, and has {fault['ctx']['actual_length']}"
    message = _shortened(str(fault["msg"]).removeprefix("Value error, "))
    return f"{place}: {message}" if place else message


def _shortened(text: str) -> str:
    """Return the message with the two ends of a value that is a page long."""
    half = _MOST_LETTERS // 2
    return text if len(text) <= _MOST_LETTERS else f"{text[:half]} ... {text[-half:]}"


def _keys(document: Any, at: Sequence[str | int]) -> list[str]:
    """The keys that the section at that place can have; none if they are not known."""
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

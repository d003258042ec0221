"""YAML as data and nothing else, with the line of each key, and bounds on what a few bytes can ask for.

A file of 400 bytes can stand for 10^9 values by aliases of aliases; a tag (``!!bool maybe``) makes PyYAML fail in ways of its own. Here
each of them is a fault with a line.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, Final, TypeAlias

import yaml

__all__ = ["Location", "YamlFaultError", "parse_yaml"]

Location: TypeAlias = tuple[str | int, ...]

_MOST_VALUES: Final = 200_000
_DEEPEST: Final = 64
_SHOWN: Final = 40
_OTHER_BASE: Final = re.compile(r"[-+]?(0[0-7_]*[0-7]|[0-9_]+(:[0-5]?[0-9])+(\.[0-9_]*)?)")


class YamlFaultError(ValueError):
    """What is wrong with a text, and on which line (counted from 1; None: not known)."""

    def __init__(self, message: str, line: int | None = None) -> None:
        self.line = line
        super().__init__(message)


class _Loader(yaml.SafeLoader):
    """PyYAML's constructors raise what Python's int, float and date raise; here that names the value."""

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        kind = node.tag.rpartition(":")[2]
        if kind in ("int", "float") and _OTHER_BASE.fullmatch(str(node.value)):
            raise YamlFaultError(
                f"{node.value} is a number to the base of {60 if ':' in node.value else 8} in YAML: write it in tens, or as a text",
                node.start_mark.line + 1,
            )
        try:
            return super().construct_object(node, deep)
        except yaml.YAMLError:
            raise
        except (ValueError, LookupError, AttributeError, TypeError, ArithmeticError) as error:
            shown = str(node.value) if len(str(node.value)) <= _SHOWN else f"{str(node.value)[:_SHOWN]}..."
            raise YamlFaultError(f"{shown!r} is no {kind}", node.start_mark.line + 1) from error


def parse_yaml(text: str) -> tuple[Any, dict[Location, int]]:
    """The value of a text, and the line of each key and item in it; None without a line for an empty text. Raises YamlFaultError."""
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        if node is None:
            return None, {}
        lines: dict[Location, int] = {}
        for at, line in _lines(node, (), ()):
            if at in lines and at:
                raise YamlFaultError(f"{at[-1]!r} is given twice (first on line {lines[at]})", line)
            lines[at] = line
            if len(lines) > _MOST_VALUES:
                raise YamlFaultError(f"with its aliases (*) written out it has more than {_MOST_VALUES:,} values", line)
        return loader.construct_document(node), lines
    except yaml.YAMLError as failure:
        mark = getattr(failure, "problem_mark", None)
        problem = getattr(failure, "problem", None) or str(failure)
        raise YamlFaultError(f"not YAML: {problem}", mark.line + 1 if mark else None) from failure
    except RecursionError as failure:
        raise YamlFaultError("not YAML that can be read: it is nested too deeply") from failure


def _lines(node: yaml.Node, at: Location, around: tuple[yaml.Node, ...]) -> Iterator[tuple[Location, int]]:
    line = node.start_mark.line + 1
    if any(node is outer for outer in around):
        raise YamlFaultError("an alias (*) refers to what it stands in", line)
    if len(around) > _DEEPEST:
        raise YamlFaultError(f"it is nested more than {_DEEPEST} deep", line)
    if not at:
        yield at, line
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            if key.tag.rpartition(":")[2] in ("null", "bool", "float", "timestamp"):
                raise YamlFaultError(f"the key {key.value!r} is no text: put it in quotes", key.start_mark.line + 1)
            here = (*at, str(key.value))
            yield here, key.start_mark.line + 1
            yield from _lines(value, here, (*around, node))
    elif isinstance(node, yaml.SequenceNode):
        for index, value in enumerate(node.value):
            here = (*at, index)
            yield here, value.start_mark.line + 1
            yield from _lines(value, here, (*around, node))

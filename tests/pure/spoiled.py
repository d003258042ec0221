"""Files as accidents and strangers leave them: a value replaced, a key gone or doubled, a letter flipped, the end cut off."""

from __future__ import annotations

import copy
import json
import math
import random
from collections.abc import Callable, Iterator
from typing import Any

import yaml

ALIASES = "a: &a [1, 1, 1, 1, 1, 1, 1, 1, 1]\n" + "".join(
    f"{b}: &{b} [*{a}, *{a}, *{a}, *{a}, *{a}, *{a}, *{a}, *{a}, *{a}]\n"
    for a, b in zip("abcdefgh", "bcdefghi", strict=True)
)
VALUES: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2**31, 2**63, 10**30, 10**400, -(10**30), 1e308, 5e-324, math.inf, -math.inf, math.nan, 0.5, "", " ", "²",
    "x" * 5000, "\x00", "\ud800", "null", "..", "999999999999x1", "1x1e9", "-1x4", "0x0", "1e999 GB", "-5 GB/s", "5 parsecs", [], {}, [[]],
    [None], {"": None}, {"a": {"b": {}}}, [0] * 3000, "nowhere.py:f", "/", "all", "NaN",
)  # fmt: skip
TAGS = (
    "!!bool maybe",
    "!!int x",
    "!!float x",
    "!!timestamp x",
    "!!python/object/apply:os.system [true]",
    "!own x",
    "!!set {a: 1}",
)
TEXTS = (
    "\x00",
    "\ufeff",
    "[" * 3000,
    "{a: " * 300,
    "- " * 300,
    "&x [*x]",
    "1" * 5000,
    "? [a]\n: b",
    "<<: {a: 1}",
    "---\n---\n",
    "\t",
    "% \n",
)


def places(content: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every place in a nested value, but the value itself."""
    items = content.items() if isinstance(content, dict) else enumerate(content) if isinstance(content, list) else ()
    for key, value in items:
        yield (*at, key)
        yield from places(value, (*at, key))


def with_other_value(content: Any, chance: random.Random) -> Any:
    """The same with one place replaced, taken out, or given a neighbour."""
    spoiled = copy.deepcopy(content)
    inside = list(places(spoiled))
    if not inside:
        return chance.choice(VALUES)
    *before, last = chance.choice(inside)
    holder = spoiled
    for key in before:
        holder = holder[key]
    match chance.randrange(8):
        case 0:
            del holder[last]
        case 1 if isinstance(holder, dict):
            holder["odd"] = chance.choice(VALUES)
        case 2 if isinstance(holder, list):
            holder.insert(0, chance.choice(VALUES))
        case _:
            holder[last] = chance.choice(VALUES)
    return spoiled


def as_yaml(content: Any, chance: random.Random) -> str:
    def text(value: Any) -> str:
        return yaml.safe_dump(value, sort_keys=False, allow_unicode=True)

    spoiled = text(with_other_value(content, chance))
    match chance.randrange(8):
        case 0:
            lines = spoiled.splitlines()
            place = chance.randrange(len(lines))
            lines[place] = lines[place].partition(":")[0] + ": " + chance.choice(TAGS)
            return "\n".join(lines)
        case 1:
            return ALIASES + text(content) if chance.random() < 0.3 else _torn(text(content), chance)
        case _:
            return spoiled


def as_json(content: Any, chance: random.Random) -> str:
    spoiled = json.dumps(with_other_value(content, chance))
    match chance.randrange(6):
        case 0:
            return _torn(json.dumps(content), chance)
        case 1:
            return spoiled.replace('{"', '{"name": 1, "name": 2, "', 1)
        case _:
            return spoiled


def as_text(content: str, chance: random.Random) -> str:
    return _torn(content, chance)


def _torn(text: str, chance: random.Random) -> str:
    place = chance.randrange(len(text) + 1)
    ways: tuple[Callable[[], str], ...] = (
        lambda: text[:place],
        lambda: text[:place] + chance.choice(TEXTS) + text[place:],
        lambda: text[:place] + chr(chance.randrange(1, 0x250)) + text[place + 1 :],
        lambda: text.replace(*chance.sample("0123456789abcdefghijklmnop{}[]:,\"'", 2)),
        lambda: text[place:] + text[:place],
    )
    return chance.choice(ways)()

"""Rows of tables, and elements by index."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from heterodyne.graph.ir import Ref
from heterodyne.graph.sharding.rule import LETTERS, Call, Rule

__all__ = ["LOOKUPS"]


def _embedding(call: Call) -> Rule:
    """``ve,... -> ...e``: columns e; rows v, of which each device gives its own and zeros for those of others."""
    ids = LETTERS[: len(call.shape(1))]
    if call.argument("scale_grad_by_freq"):
        ids = "." * len(ids)  # it counts how often an id is there
    rows = "." if call.argument("scale_grad_by_freq") or call.argument("sparse") else "V"
    return Rule(operands=(f"{rows}E", ids), outputs=(f"{ids}E",), summed=rows.strip("."))


def _index_select(call: Call) -> Rule:
    letters = LETTERS[: len(call.output)]
    dim = call.whole_number("dim", 0) % max(1, len(letters))
    source = letters[:dim] + "." + letters[dim + 1 :]
    index = letters[dim] if len(call.shape(1)) == 1 else ""
    result = letters if index else source
    return Rule(operands=(source, index), outputs=(result,), linear=(frozenset({0}),))


def _gather(call: Call) -> Rule | None:
    """Along a dim, which is whole in the source; other dims if they are as long in the source as in the index."""
    if len(call.shape(0)) != len(call.shape(1)) or len(call.output) != len(call.shape(1)):
        return None  # of all elements in a row
    dim = call.whole_number("dim", 0) % max(1, len(call.output))
    source, index = "", ""
    for place, (letter, size, taken) in enumerate(zip(LETTERS, call.shape(0), call.shape(1), strict=False)):
        same = place != dim and size == taken
        source += letter if same else "."
        index += letter if same or place == dim else "."
    return Rule(operands=(source, index), outputs=(index,), linear=(frozenset({0}),))


def _index(call: Call) -> Rule | None:
    """``x[:, ids]``: one tensor of indices. Other dims, and those of the index, are free."""
    given = call.argument("indices")
    if not isinstance(given, tuple) or len(call.specs) != 2 or call.specs[1].dtype == "bool":
        return None
    at = next(place for place, index in enumerate(given) if isinstance(index, Ref))
    rank, taken = len(call.shape(0)), len(call.shape(1))
    own, of_index = LETTERS[:rank], LETTERS[rank : rank + taken]
    source = own[:at] + "." + own[at + 1 :]
    return Rule(operands=(source, of_index), outputs=(own[:at] + of_index + own[at + 1 :],), linear=(frozenset({0}),))


def _one_hot(call: Call) -> Rule:
    ids = LETTERS[: len(call.shape(0))]
    return Rule(operands=(ids,), outputs=(f"{ids}.",))


LOOKUPS: Final[Mapping[str, Callable[[Call], Rule | None]]] = {
    "embedding": _embedding,
    "index_select": _index_select,
    "gather": _gather,
    "take_along_dim": _gather,
    "index": _index,
    "one_hot": _one_hot,
}

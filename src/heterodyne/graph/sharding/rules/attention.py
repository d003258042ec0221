"""Attention in one op: samples and heads are free, and the queries' positions, if the keys are whole."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from heterodyne.graph.ir import Ref
from heterodyne.graph.sharding.rule import Call, Rule, common_units
from heterodyne.graph.size import Size

__all__ = ["ATTENTION"]

_ONE: Final = Size.of(1)


def _attention(call: Call) -> Rule | None:
    """``bhle,bhse,bhsv->bhlv`` with a mask ``bhls``; with fewer heads of keys than of queries, these are cut in whole groups.

    Positions of the queries (l) may be cut; where the op is causal it has to know which they are. Where weights are dropped out, the
    members would need the same ones for each of the values' columns (v), so these stay whole.
    """
    query, key, value = (call.shape(place) for place in range(3))
    if not len(query) == len(key) == len(value) == 4:
        return None
    column = "." if call.argument("dropout_p") else "v"
    output = f"bhl{column}"
    mask = (_mask(call),) if isinstance(call.argument("attn_mask"), Ref) else ()
    units = {"h": common_units(query[1], key[1])}
    batch_free = query[0] == key[0] == value[0]
    operands = ("bhl.", "bh..", f"bh.{column}", *mask)
    if not batch_free:
        operands, output = tuple(x.replace("b", ".") for x in operands), output.replace("b", ".")
    return Rule(operands=operands, outputs=(output,), units=units, filled="h" if call.argument("dropout_p") else "")


def _mask(call: Call) -> str:
    shape = call.shape(3)
    names = "bhls"[4 - len(shape) :]
    return "".join("." if size == _ONE or letter == "s" else letter for letter, size in zip(names, shape, strict=True))


ATTENTION: Final[Mapping[str, Callable[[Call], Rule | None]]] = {"scaled_dot_product_attention": _attention}

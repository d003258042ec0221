"""The table of rules, one an op; a file a family of ops.

An op that is not in the table, or whose rule says nothing for the way in which it is called, reads whole tensors and is done by each
device in full: slower, and never wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Final

from heterodyne.graph.ir import ModelGraph, Op
from heterodyne.graph.sharding.rule import Call, Rule
from heterodyne.graph.sharding.rules.attention import ATTENTION
from heterodyne.graph.sharding.rules.convolutions import CONVOLUTIONS
from heterodyne.graph.sharding.rules.experts import EXPERTS
from heterodyne.graph.sharding.rules.lookups import LOOKUPS
from heterodyne.graph.sharding.rules.losses import LOSSES
from heterodyne.graph.sharding.rules.normalisation import NORMALISATION
from heterodyne.graph.sharding.rules.pointwise import POINTWISE
from heterodyne.graph.sharding.rules.products import PRODUCTS
from heterodyne.graph.sharding.rules.reductions import REDUCTIONS
from heterodyne.graph.sharding.rules.shapes import SHAPES

__all__ = ["rule_of"]

_TABLE: Final[Mapping[str, Callable[[Call], Rule | None]]] = {
    **ATTENTION,
    **CONVOLUTIONS,
    **EXPERTS,
    **LOOKUPS,
    **LOSSES,
    **NORMALISATION,
    **POINTWISE,
    **PRODUCTS,
    **REDUCTIONS,
    **SHAPES,
}


def rule_of(op: Op, graph: ModelGraph) -> Rule:
    """Return what an op allows; nothing but whole tensors, where the table says nothing."""
    call = Call(op, tuple(graph.spec(ref) for ref in op.operands))
    # Of an op whose arguments are not told, as in a graph that was made by hand, nothing can be said.
    make = _TABLE.get(op.kind) if op.arguments else None
    found = None if make is None else make(call)
    if found is None:
        found = Rule(
            operands=tuple("." * len(spec.shape) for spec in call.specs),
            outputs=tuple("." * len(spec.shape) for spec in op.outputs),
        )
    _require_fitting(found, call)
    return replace(found, linear=tuple(places for places in found.linear if _may_be_parts(places, call)))


def _may_be_parts(places: frozenset[int], call: Call) -> bool:
    """Truth values do not add up. What is written in place is of parts only if what was there is."""
    if any(call.specs[place].dtype == "bool" for place in places):
        return False
    return 0 in places or not call.op.writes


def _require_fitting(rule: Rule, call: Call) -> None:
    """A rule of the table that names other dims than there are is a fault of the table."""
    named = [len(dims) for dims in (*rule.operands, *rule.outputs)]
    there = [len(spec.shape) for spec in (*call.specs, *call.op.outputs)]
    if named != there:
        raise AssertionError(f"the rule of {call.op.target} ({call.op.name}) names {named} dims, and there are {there}")

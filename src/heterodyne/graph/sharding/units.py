"""Where the cuts of a dim may be: in units that every op on the way can bear.

A linear layer's columns may be cut anywhere, until they become heads, in whole groups of which keys and values are shared. So dims that
are cut together, through all ops and tensors that pass the cut on, are one family, and its units are what all of them have in common.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from heterodyne.graph.ir import ModelGraph, Op, Ref
from heterodyne.graph.sharding.layout import Layout
from heterodyne.graph.sharding.rule import OpStrategy, Rule, common_units
from heterodyne.graph.size import Size

__all__ = ["UnitFamilies", "UnitFamily", "families_of", "limits"]

_Slot = tuple[Ref, Layout]  # a tensor as it is cut


@dataclass(frozen=True, kw_only=True)
class UnitFamily:
    """``units``: how many there are; ``by``: the list of shares that they are dealt out by; ``cuts``: the ops that it passes, by name, with
    the letter that is cut in each."""

    units: Size
    by: int
    cuts: tuple[tuple[str, str], ...]


@dataclass(frozen=True, kw_only=True)
class UnitFamilies:
    """The family of each tensor that is cut, in each way in which it is."""

    of: Mapping[_Slot, UnitFamily]

    def units(self, ref: Ref, layout: Layout) -> Size:
        """Return how many units that dim of the tensor is dealt out in. Raises KeyError for a tensor that is never cut so."""
        return self.of[ref, layout].units


def families_of(
    graph: ModelGraph,
    rules: Mapping[str, Rule],
    strategies: Mapping[str, OpStrategy],
    fixed: Mapping[_Slot, Size],
) -> UnitFamilies:
    """The families of a stage.

    Args:
        rules, strategies: of its ops, by name.
        fixed: cuts that somebody else has agreed on (samples, at the borders of a stage), and their units.
    """
    parent: dict[_Slot, _Slot] = {}
    units: dict[_Slot, Size] = {}
    passed: dict[_Slot, set[tuple[str, str]]] = {}

    def find(slot: _Slot) -> _Slot:
        parent.setdefault(slot, slot)
        while parent[slot] != slot:
            parent[slot] = parent[parent[slot]]
            slot = parent[slot]
        return slot

    def join(slot: _Slot, limit: Size) -> None:
        root = find(slot)
        units[root] = limit if root not in units else common_units(units[root], limit)

    def unite(a: _Slot, b: _Slot) -> None:
        one, other = find(a), find(b)
        if one != other:
            parent[other] = one
            if other in units:
                join(one, units.pop(other))
            passed.setdefault(one, set()).update(passed.pop(other, ()))

    for slot, limit in fixed.items():
        join(slot, limit)
    for name, strategy in strategies.items():
        if not strategy.divides:
            continue
        rule = rules[name]
        for letter, slots in _by_letter(graph.op_by_name[name], rule, strategy).items():
            for slot in slots:
                join(slot, graph.spec(slot[0]).shape[slot[1].dim])
                unite(slots[0], slot)
            if letter in rule.units:
                join(slots[0], rule.units[letter])
            passed.setdefault(find(slots[0]), set()).add((name, letter))
    place = {op.name: number for number, op in enumerate(graph.ops)}
    made = {
        root: UnitFamily(
            units=units[root],
            by=root[1].by,
            cuts=tuple(sorted(passed.get(root, ()), key=lambda cut: (place[cut[0]], cut[1]))),
        )
        for root in dict.fromkeys(find(slot) for slot in list(parent))
    }
    return UnitFamilies(of={slot: made[find(slot)] for slot in list(parent)})


def _by_letter(op: Op, rule: Rule, strategy: OpStrategy) -> dict[str, list[_Slot]]:
    """Return what an op reads and returns cut, by the letter that is cut."""
    found: dict[str, list[_Slot]] = {}
    refs = (*op.operands, *(Ref(op.name, place) for place in range(len(op.outputs))))
    layouts = (*strategy.operands, *strategy.outputs)
    for ref, layout, dims in zip(refs, layouts, (*rule.operands, *rule.outputs), strict=True):
        if layout.kind == "shard":
            found.setdefault(dims[layout.dim], []).append((ref, layout))
    return found


def limits(op: Op, rule: Rule, letter: str, graph: ModelGraph) -> Size:
    """Into how many units an op by itself can be cut along a letter."""
    found: Size | None = rule.units.get(letter)
    specs = (*map(graph.spec, op.operands), *op.outputs)
    for spec, dims in zip(specs, (*rule.operands, *rule.outputs), strict=True):
        if letter in dims:
            size = spec.shape[dims.index(letter)]
            found = size if found is None else common_units(found, size)
    assert found is not None
    return found

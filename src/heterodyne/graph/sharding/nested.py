"""Several axes of a stage: how tensors are laid out along one after another.

Each axis is worked out for the whole tensors, outermost first, and a dim of a tensor is cut along one axis at most. So what an op does on
slices of one axis it does on slices of these along the next one: layouts, conversions and gradients of the axes do not see each other.
The borders of a stage are the exception: there every axis cuts by samples, each what the outer ones have left to its device. Nothing but a
conversion from or to the border sees a tensor so.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

from heterodyne.graph.ir import Op, Ref
from heterodyne.graph.sharding.layout import Layout
from heterodyne.graph.sharding.problem import Problem
from heterodyne.graph.sharding.rule import OpStrategy, Rule
from heterodyne.graph.sharding.rules import rule_of
from heterodyne.graph.sharding.sharding import Sharding

__all__ = ["Turn", "nested", "shard_along", "turns"]


class Turn(NamedTuple):
    """How a tensor is laid out along an axis, and how it is wanted; and of each whether an outer axis cuts the same dim (at a border)."""

    axis: int
    have: Layout
    want: Layout
    had_nested: bool = False
    nested: bool = False


def shard_along(problems: Sequence[Problem], work_out: Callable[[Problem, int], Sharding]) -> Sharding:
    """Along all axes. ``problems``: of each axis, outermost first; ``work_out``: along one, by its number."""
    found: list[Sharding] = []
    for number, problem in enumerate(problems):
        taken = _taken(found, problem)
        found.append(work_out(replace(problem, forbidden=problem.forbidden | taken), number))
    made = found[-1]
    for outer in reversed(found[:-1]):
        made = replace(outer, inner=made)
    return made


def turns(have: Sequence[Layout], want: Sequence[Layout]) -> list[Turn]:
    """The conversions from one set of layouts (one an axis, outermost first) to another, in order."""
    leaving = [axis for axis in reversed(range(len(have))) if nested(have, axis)]
    others = [axis for axis in range(len(have)) if axis not in leaving]
    return [
        Turn(axis, have[axis], want[axis], axis in leaving, nested(want, axis))
        for axis in (*leaving, *others)
        if have[axis] != want[axis]
    ]


def nested(layouts: Sequence[Layout], axis: int) -> bool:
    """Return whether an axis cuts the dim that one outside of it cuts."""
    own = layouts[axis]
    return own.kind == "shard" and any(outer.kind == "shard" and outer.dim == own.dim for outer in layouts[:axis])


def _taken(outer: Sequence[Sharding], problem: Problem) -> frozenset[tuple[str, str]]:
    """The letters of each op along which no further axis may cut it."""
    dims: dict[Ref, set[int]] = {}
    for sharding in outer:
        for ref, layout in _layouts(sharding, problem):
            if layout.kind == "shard":
                dims.setdefault(ref, set()).add(layout.dim)
    found: set[tuple[str, str]] = set()
    for op in problem.ops if outer else ():
        rule = rule_of(op, problem.graph)
        refs = (*op.operands, *_made(op))
        named = zip(refs, (*rule.operands, *rule.outputs), strict=True)
        letters = {of[dim] for ref, of in named for dim in dims.get(ref, ())} - {"."}
        if any(_done_together(op, rule, sharding.strategies[op.name]) for sharding in outer):
            letters.update(rule.letters)
        found.update((op.name, letter) for letter in letters)
    return frozenset(found)


def _layouts(sharding: Sharding, problem: Problem) -> list[tuple[Ref, Layout]]:
    """All in which any tensor ever is laid out."""
    found = [*sharding.layouts.items(), *sharding.wanted.items(), *problem.given.items()]
    for op in problem.ops:
        strategy = sharding.strategies[op.name]
        found += [*zip(op.operands, strategy.operands, strict=True), *zip(_made(op), strategy.outputs, strict=True)]
    return found


def _made(op: Op) -> list[Ref]:
    return [Ref(op.name, place) for place in range(len(op.outputs))]


def _done_together(op: Op, rule: Rule, strategy: OpStrategy) -> bool:
    """Return whether members need something of each other inside of the op, or weigh their parts by it."""
    if not strategy.divides:
        return False
    weighed = strategy.outputs[0].kind == "partial" and (op.kind == "mean" or op.argument("reduction") is not None)
    return weighed or strategy.name in rule.exchanged or strategy.name in rule.together

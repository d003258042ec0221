"""Chooses how each op of a stage runs on its devices: of all ways that the rules allow, the one that exchanges and repeats least.

A beam search in topological order. A state says how each tensor that is still needed lies; two ways that leave the same state are one,
the dearer is forgotten. On graphs where few tensors are alive at a time, as in most models, few states differ, and the best is found.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final, Literal

from heterodyne.graph.ir import ModelGraph, Op, Ref
from heterodyne.graph.sharding.layout import COPY, WHOLE, Layout, conversion
from heterodyne.graph.sharding.price import Price
from heterodyne.graph.sharding.rule import Rule, Strategy
from heterodyne.graph.sharding.rules import rule_of

__all__ = ["Choice", "Mode", "Problem", "solve"]

BEAM: Final = 24


@dataclass(frozen=True, slots=True)
class Mode:
    """What the plan says of an op: how its region lies on the devices, and which list of shares it goes by."""

    kind: Literal["replicate", "split", "context"] = "replicate"
    by: int = 0


@dataclass(frozen=True, kw_only=True)
class Problem:
    """What is given and what is wanted.

    Args:
        graph: the model.
        ops: of the stage, in order, with those that it makes again for itself.
        modes: of each op.
        given: how what it receives lies; the model's inputs are whole.
        wanted: how what it sends, or the loss, shall lie.
        samples: of a micro-batch.
        forbidden: ``(op, letter)`` that may not be cut.
    """

    graph: ModelGraph
    ops: tuple[Op, ...]
    modes: Mapping[str, Mode]
    given: Mapping[Ref, Layout]
    wanted: Mapping[Ref, Layout]
    samples: int
    price: Price
    forbidden: frozenset[tuple[str, str]] = frozenset()


@dataclass(frozen=True, kw_only=True)
class Choice:
    """How the ops run.

    Args:
        strategies: of each op, by name.
        layouts: of each tensor as it is made, received or kept.
        cost: in bytes (`Price`).
    """

    strategies: Mapping[str, Strategy]
    layouts: Mapping[Ref, Layout]
    cost: float


@dataclass(slots=True)
class _State:
    """``tensors``: of what is needed later its layout, and those that it was converted to at some cost."""

    cost: float
    tensors: dict[Ref, tuple[Layout, frozenset[Layout]]]
    last: tuple[object, ...] | None  # (state before, op, strategy, layouts of parameters that this op has fixed)


@dataclass(frozen=True)
class _Facts:
    """What does not change while the search goes on."""

    problem: Problem
    stored: Mapping[str, bool]  # parameters and buffers, and whether they are trained
    bytes: dict[Ref, float] = field(default_factory=dict)
    differentiable: dict[Ref, bool] = field(default_factory=dict)

    def size(self, ref: Ref) -> float:
        if ref not in self.bytes:
            self.bytes[ref] = self.problem.graph.spec(ref).bytes(self.problem.samples)
        return self.bytes[ref]

    def flows(self, ref: Ref) -> bool:
        """Whether gradients flow into it."""
        return self.differentiable.get(ref, self.stored.get(ref.name, False))


def solve(problem: Problem) -> Choice:
    """The cheapest way that is found."""
    graph = problem.graph
    facts = _Facts(
        problem, {**{p.name: p.trainable for p in graph.parameters}, **{b.name: False for b in graph.buffers}}
    )
    last_use = _last_uses(problem)
    tensors: dict[Ref, tuple[Layout, frozenset[Layout]]] = {}
    for entry in graph.inputs:
        tensors[Ref(entry.name)] = (WHOLE, frozenset())
    for constant in graph.constants:
        tensors[Ref(constant.name)] = (WHOLE, frozenset())
    for op in graph.ops:
        for place, flows in enumerate(op.differentiable):
            facts.differentiable[Ref(op.name, place)] = flows
    for ref, layout in problem.given.items():
        tensors[ref] = (layout, frozenset())
    states = [_State(0.0, {ref: held for ref, held in tensors.items() if last_use.get(ref, -1) >= 0}, None)]
    for position, op in enumerate(problem.ops):
        rule = rule_of(op, graph)
        found: dict[object, _State] = {}
        for state in states:
            for strategy in _candidates(op, rule, state, facts):
                after = _after(state, op, strategy, facts)
                if after is None:
                    continue
                for ref in {ref for ref in (*op.operands, *after.tensors) if last_use.get(ref, -1) <= position}:
                    after.tensors.pop(ref, None)
                key = frozenset(after.tensors.items())
                if key not in found or after.cost < found[key].cost:
                    found[key] = after
        assert found, f"no way to run {op.name}"
        states = sorted(found.values(), key=lambda s: s.cost)[:BEAM]
    finals = [(state.cost + _wanted_cost(state, facts), number) for number, state in enumerate(states)]
    cost, best = min(finals)
    return _told(states[best], cost, tensors)


def _last_uses(problem: Problem) -> dict[Ref, int]:
    """For each tensor the place of the last op that reads it; of what is wanted, the end."""
    last = {ref: position for position, op in enumerate(problem.ops) for ref in op.operands}
    return last | dict.fromkeys(problem.wanted, len(problem.ops))


def _candidates(op: Op, rule: Rule, state: _State, facts: _Facts) -> Iterable[Strategy]:
    """The ways to run an op that its mode allows."""
    problem = facts.problem
    mode = problem.modes[op.name]
    letters = [x for x in rule.letters if (op.name, x) not in problem.forbidden]
    batch = [x for x in letters if _follows_the_batch(op, rule, x, problem.graph)]
    if rule.only:
        return [rule.strategy(rule.only, mode.by if mode.kind == "replicate" else 0)]
    if mode.kind == "replicate":
        if batch:
            return [rule.strategy(batch[0], mode.by)]
        return [rule.whole, *rule.in_parts]
    if _cut_for_nothing(op, state, facts):
        return [rule.whole]
    found = [rule.strategy(x, by) for x in letters for by in _lists(op, rule, x, state, mode)]
    if mode.kind == "split":
        heavy = [s for s in found if _cuts_a_weight(op, s, facts)]
        if heavy:
            return heavy
    else:
        # Samples stay together, but for what has to be cut by samples (statistics) and what is done to that in place.
        free = [x for x in letters if x not in batch or _is_cut_there(op, rule, x, state)]
        found = [s for s in found if s.name in free and not _cuts_a_weight(op, s, facts)]
    return [rule.whole, *found, *rule.in_parts]


def _cut_for_nothing(op: Op, state: _State, facts: _Facts) -> bool:
    """Masks, positions and the like: whole tensors without gradients, which are as well cut later, where they are read, for nothing."""
    if any(op.differentiable):
        return False
    return all(ref.name not in facts.stored and state.tensors[ref][0] == WHOLE for ref in op.operands)


def _lists(op: Op, rule: Rule, letter: str, state: _State, mode: Mode) -> set[int]:
    """The lists of shares by which a letter may be cut: its region's own, and those by which an operand is cut there already."""
    return {mode.by, *(layout.by for layout in _cuts_there(op, rule, letter, state))}


def _is_cut_there(op: Op, rule: Rule, letter: str, state: _State) -> bool:
    return bool(_cuts_there(op, rule, letter, state))


def _cuts_there(op: Op, rule: Rule, letter: str, state: _State) -> list[Layout]:
    """How operands lie that are cut along a letter already."""
    held = [
        (state.tensors[ref][0], dims)
        for ref, dims in zip(op.operands, rule.operands, strict=True)
        if ref in state.tensors
    ]
    return [
        layout for layout, dims in held if layout.kind == "cut" and letter in dims and dims.index(letter) == layout.dim
    ]


def _follows_the_batch(op: Op, rule: Rule, letter: str, graph: ModelGraph) -> bool:
    for ref, dims in zip(op.operands, rule.operands, strict=True):
        if letter in dims and not graph.spec(ref).shape[dims.index(letter)].is_constant:
            return True
    outputs = zip(rule.outputs, op.outputs, strict=True)
    return any(letter in dims and not spec.shape[dims.index(letter)].is_constant for dims, spec in outputs)


def _cuts_a_weight(op: Op, strategy: Strategy, facts: _Facts) -> bool:
    """Whether it divides a trained parameter of two dims or more."""
    return any(
        layout.kind == "cut" and facts.stored.get(ref.name, False) and len(facts.problem.graph.spec(ref).shape) > 1
        for ref, layout in zip(op.operands, strategy.operands, strict=True)
    )


def _after(state: _State, op: Op, strategy: Strategy, facts: _Facts) -> _State | None:
    """The state after an op has run in one way; None if memory that it writes into would have to be converted for it."""
    cost, price = state.cost, facts.problem.price
    tensors = dict(state.tensors)
    fixed: list[tuple[Ref, Layout]] = []
    for ref, want in zip(op.operands, strategy.operands, strict=True):
        held = tensors.get(ref)
        if held is None:  # a parameter or buffer that lies as its first reader wants it
            have = want if want.kind == "cut" else COPY
            tensors[ref] = held = (have, frozenset())
            fixed.append((ref, have))
        have, converted = held
        if have == want:
            continue
        if not _may_be_converted(op, ref, have, want, facts):
            return None
        if want in converted:
            continue
        steps = conversion(have, want, differentiable=facts.flows(ref))
        size = facts.size(ref)
        extra = price.collective(steps.forward, size) + price.collective(steps.backward, size)
        if extra:
            cost += extra
            tensors[ref] = (have, converted | {want})
    samples = facts.problem.samples
    flops = op.flops_forward(samples) + op.flops_backward(samples)
    traffic = 3 * (op.bytes_read(samples) + op.bytes_written(samples))
    cost += price.work(flops, traffic, divided=strategy.divides)
    if strategy.divides and strategy.name in rule_of(op, facts.problem.graph).exchanged:
        cost += 3 * price.latency_bytes
    for place, layout in enumerate(strategy.outputs):
        tensors[Ref(op.name, place)] = (layout, frozenset())
    for ref, (have, converted) in list(tensors.items()):
        if converted and op.writes and _memory(ref, facts) in op.writes:
            tensors[ref] = (have, frozenset())
    return _State(cost, tensors, (state, op.name, strategy, tuple(fixed)))


def _memory(ref: Ref, facts: _Facts) -> str | None:
    """Which memory a tensor lies in, if it is one that something is written into."""
    op = facts.problem.graph.op_by_name.get(ref.name)
    return ref.name if op is None else op.memory


def _may_be_converted(op: Op, ref: Ref, have: Layout, want: Layout, facts: _Facts) -> bool:
    """What an op writes into, or returns a view of, is the tensor itself: a converted copy would take the change for itself."""
    memory = _memory(ref, facts)
    if memory is None or (memory not in op.writes and memory != op.memory):
        return True
    return {have, want} <= {WHOLE, COPY} and not facts.flows(ref)


def _wanted_cost(state: _State, facts: _Facts) -> float:
    total, price = 0.0, facts.problem.price
    for ref, want in facts.problem.wanted.items():
        have, converted = state.tensors[ref]
        if want not in converted:
            steps = conversion(have, want, differentiable=facts.flows(ref))
            total += price.collective(steps.forward, facts.size(ref)) + price.collective(
                steps.backward, facts.size(ref)
            )
    return total


def _told(state: _State, cost: float, given: Mapping[Ref, tuple[Layout, frozenset[Layout]]]) -> Choice:
    strategies: dict[str, Strategy] = {}
    layouts = {ref: layout for ref, (layout, _) in given.items()}
    at: _State | None = state
    while at is not None and at.last is not None:
        before, name, strategy, fixed = at.last
        assert isinstance(strategy, Strategy)
        assert isinstance(name, str)
        assert isinstance(fixed, tuple)
        strategies[name] = strategy
        layouts.update({Ref(name, place): layout for place, layout in enumerate(strategy.outputs)})
        layouts.update(dict(fixed))
        assert isinstance(before, _State)
        at = before
    return Choice(strategies=dict(reversed(strategies.items())), layouts=layouts, cost=cost)

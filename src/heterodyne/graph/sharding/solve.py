"""Chooses how each op of a stage runs on its devices: of all ways that the rules allow, the one that exchanges and repeats least.

A search in topological order. A state is the layout of each tensor that is still needed. Of two ways that reach the same state the
dearer one is dropped, and so is a state that another one dominates: whatever the remaining ops read, the other one spends less in
total (`_Search._regret`). Neither loses an optimum, so what is found is one, if no more than `BEAM` states are ever left beside each
other. If more are, it is a beam search, which also drops states that a cheaper one could be converted to (`_Search._gap`): good
layouts, but no proof. Equal layers that are entered in equal states are solved once.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import inf
from typing import Final, NamedTuple, TypeAlias

from heterodyne.errors import PlanError
from heterodyne.graph.ir import Op, Ref
from heterodyne.graph.sharding.layout import COPY, PARTIAL, REPLICATE, Layout, sharded
from heterodyne.graph.sharding.price import Price
from heterodyne.graph.sharding.problem import Problem
from heterodyne.graph.sharding.rule import OpStrategy
from heterodyne.graph.sharding.ways import GRAINS, Held, Tensor, Way, Ways, tensor_of, ways_of

__all__ = ["Choice", "solve"]

BEAM: Final = 48
_CHAMPIONS: Final = 3
"""With how many of the cheapest states each is compared."""

_OTHERS: Final = (REPLICATE, COPY, PARTIAL)


@dataclass(frozen=True, kw_only=True)
class Choice:
    """How the ops run.

    Args:
        strategies: of each op, by name.
        layouts: of each tensor as it is made, received or kept.
        cost: in bytes (`Price`).
        optimal: whether no way is cheaper; False: the beam was too narrow to tell.
    """

    strategies: Mapping[str, OpStrategy]
    layouts: Mapping[Ref, Layout]
    cost: float
    optimal: bool


class _Stuck(Exception):  # noqa: N818  # it never leaves this file
    """What is written into memory cannot be done to it as it is laid out, nor may it be laid out otherwise."""

    def __init__(self, op: Op, memories: frozenset[str]) -> None:
        super().__init__(op.name)
        self.op = op
        self.memories = memories


class _TooMany(Exception):  # noqa: N818  # neither does it
    """More states are left beside each other than the beam is wide."""


def solve(problem: Problem) -> Choice:
    """The cheapest way, of few layers; of many a good one. Raises PlanError if there is none.

    What is in memory that is written into is not laid out otherwise; where an op that needs it so leaves no way, it is whole all along.
    """
    whole: frozenset[str] = frozenset()
    while True:
        try:
            return _Search(problem, whole).choice()
        except _Stuck as stuck:
            if stuck.memories <= whole:
                raise PlanError(
                    f"{stuck.op.target} ({stuck.op.source or stuck.op.name}) works in place on what is sharded over several devices, and "
                    "needs it whole: do it out of place (x = x + y, not x += y), or cut the model elsewhere"
                ) from None
            whole |= stuck.memories


_Tensors: TypeAlias = tuple[int, ...]
"""How the tensors of a state are laid out, each by a number that stands for a `Held`."""


class _Step(NamedTuple):
    """An op, and where in a state the tensors are that it has to do with. Steps that are equal do the same to the same states.

    Args:
        ways: of the op.
        enters: how those of the given tensors are laid out that it is the first to read.
        reads: place of each tensor that it reads; -1: one that is stored, and is in no state yet.
        changed: places of what is in memory that it writes into.
        kept: what is needed later, of the tensors of the state, those that enter, those that are stored and first read, and those that
            it returns, in a row.
        alive: numbers of the kinds that these are of, as far as conversions are concerned.
        reads_left: how many of the remaining ops read each of them, in how many operands; the end of the stage counts as one.
    """

    ways: Ways
    enters: tuple[int, ...]
    reads: tuple[int, ...]
    changed: tuple[int, ...]
    kept: tuple[int, ...]
    alive: tuple[int, ...]
    reads_left: tuple[int, ...]


class _State(NamedTuple):
    """``parent``: its place among the states before; ``way``: how the op was run."""

    tensors: _Tensors
    cost: int
    parent: int
    way: Way | None


class _Search:
    """``whole``: memories whose tensors are not cut."""

    def __init__(self, problem: Problem, whole: frozenset[str]) -> None:
        self._problem = problem
        self._ways = ways_of(problem, whole)
        self._written = {memory for op in problem.graph.ops for memory in op.writes}
        self._exact = True
        self._held: list[Held] = []
        self._numbers: dict[Held, int] = {}
        self._kinds: dict[tuple[float, int, bool, bool], int] = {}
        self._tensors: list[Tensor] = []  # one of each kind
        self._transitions: dict[tuple[Ways, tuple[int, ...]], list[tuple[Way, _Tensors, _Tensors]]] = {}
        self._gaps: dict[tuple[int, int, int], float] = {}
        self._regrets: dict[tuple[int, int, int, int], float] = {}
        self._lists = sorted({mode.by for mode in problem.modes.values()} | {one.by for one in problem.given.values()})
        self._one_list = len(self._lists) == 1 and all(mode.kind == "split" for mode in problem.modes.values())

    def choice(self) -> Choice:
        """The cheapest way through all ops."""
        problem = self._problem
        given = dict.fromkeys([Ref(i.symbol) for i in problem.graph.inputs], REPLICATE)
        given |= dict.fromkeys([Ref(constant.name) for constant in problem.graph.constants], REPLICATE)
        given |= problem.given
        steps, last = self._steps(given)
        try:
            history, spent = self._through(steps, [_State((), 0, -1, None)])
        except _TooMany:
            self._exact = False
            history, spent = self._through(steps, [_State((), 0, -1, None)])
        finals = [(state.cost + self._wanted_cost(state, last), place) for place, state in enumerate(history[-1])]
        cost, place = min(finals)
        strategies: dict[str, OpStrategy] = {}
        layouts: dict[Ref, Layout] = given
        for position in range(len(steps) - 1, -1, -1):
            op, (_, _, parent, way) = problem.ops[position], history[position + 1][place]
            assert way is not None
            strategies[op.name] = way.strategy
            layouts |= {Ref(op.name, number): layout for number, layout in enumerate(way.strategy.outputs)}
            refs = zip(dict.fromkeys(op.operands), way.held, steps[position].reads, strict=True)
            layouts |= {ref: held[0] for ref, held, at in refs if at < 0}
            place = parent
        return Choice(
            strategies=dict(reversed(strategies.items())),
            layouts=layouts,
            cost=(spent + cost) / GRAINS,
            optimal=self._exact,
        )

    def _steps(self, given: Mapping[Ref, Layout]) -> tuple[list[_Step], list[Ref]]:
        """With what is alive after the last one."""
        problem = self._problem
        reads = Counter(ref for op in problem.ops for ref in op.operands)
        reads.update(problem.wanted.keys())
        alive: list[Ref] = []
        steps = []
        for op, ways in zip(problem.ops, self._ways, strict=True):
            refs = dict.fromkeys(op.operands)
            reads.subtract(op.operands)
            entering = [ref for ref in refs if ref in given and ref not in alive]
            place = {ref: number for number, ref in enumerate([*alive, *entering])}
            row = [*place, *(ref for ref in refs if ref not in place)]
            changed = [at for at, ref in enumerate(row) if problem.graph.memory_of(ref) in op.writes]
            row += [Ref(op.name, number) for number in range(len(op.outputs))]
            kept = [at for at, ref in enumerate(row) if reads[ref]]
            alive = [row[at] for at in kept]
            steps.append(
                _Step(
                    ways,
                    tuple(self._number((given[ref], frozenset())) for ref in entering),
                    tuple(place.get(ref, -1) for ref in refs),
                    tuple(changed),
                    tuple(kept),
                    tuple(self._kind(ref) for ref in alive),
                    tuple(reads[ref] for ref in alive),
                )
            )
        return steps, alive

    def _through(self, steps: Sequence[_Step], states: list[_State]) -> tuple[list[list[_State]], int]:
        """The states ahead of each step and after the last; their costs are counted from what all of them have spent by then."""
        known: dict[object, list[list[_State]]] = {}
        history, spent = [states], 0
        for start, stop in self._segments():
            least = min(state.cost for state in history[-1])
            states = [state._replace(cost=state.cost - least) for state in history[-1]]
            spent += least
            key = tuple(steps[start:stop]), tuple((state.tensors, state.cost) for state in states)
            if key not in known:
                known[key] = []
                for position in range(start, stop):
                    states = self._after(steps[position], states, self._problem.ops[position])
                    known[key].append(states)
            history += known[key]
        return history, spent

    def _segments(self) -> Iterator[tuple[int, int]]:
        """Runs of ops of one block."""
        graph = self._problem.graph
        position = {op.name: number for number, op in enumerate(graph.ops)}
        starts = [block.start for block in graph.blocks]
        blocks = [bisect_right(starts, position[op.name]) for op in self._problem.ops]
        borders = [n for n in range(len(blocks)) if n == 0 or blocks[n] != blocks[n - 1]]
        return pairwise([*borders, len(blocks)])

    def _after(self, step: _Step, states: Sequence[_State], op: Op) -> list[_State]:
        """The best states after a step."""
        found: dict[_Tensors, tuple[int, int, Way]] = {}
        for parent, state in enumerate(states):
            before = state.tensors + step.enters
            for way, read, made in self._transitions_of(
                step.ways, tuple(-1 if at < 0 else before[at] for at in step.reads)
            ):
                row = list(before)
                for at, number in zip(step.reads, read, strict=True):
                    if at < 0:
                        row.append(number)
                    else:
                        row[at] = number
                for at in step.changed:
                    row[at] = self._number((self._held[row[at]][0], frozenset()))
                row += made
                tensors = tuple([row[at] for at in step.kept])
                cost = state.cost + way.cost
                if tensors not in found or cost < found[tensors][0]:
                    found[tensors] = cost, parent, way
        if not found:
            raise _Stuck(op, frozenset(self._in_the_way(step, states, op)))
        ordered = [_State(tensors, *rest) for tensors, rest in sorted(found.items(), key=lambda entry: entry[1][0])]
        if not self._exact:
            return self._apart(step, ordered, self._gap)[:BEAM]
        best = self._apart(step, ordered, self._regret)
        if len(best) > BEAM:
            raise _TooMany
        return best

    def _apart(
        self, step: _Step, ordered: Sequence[_State], distance: Callable[[_Step, _Tensors, _Tensors], float]
    ) -> list[_State]:
        """The cheapest states, up to one more than the beam is wide, without those that a cheaper one is near enough to replace."""
        best: list[_State] = []
        for state in ordered:
            near = (one.cost + distance(step, one.tensors, state.tensors) <= state.cost for one in best[:_CHAMPIONS])
            if not any(near):
                best.append(state)
                if len(best) > BEAM:
                    break
        return best

    def _transitions_of(self, ways: Ways, held: tuple[int, ...]) -> list[tuple[Way, _Tensors, _Tensors]]:
        """For each way, how what is read is laid out afterwards, and what is returned."""
        key = ways, held
        if key not in self._transitions:
            self._transitions[key] = [
                (
                    way,
                    tuple(self._number(one) for one in way.held),
                    tuple(self._number((layout, frozenset())) for layout in way.strategy.outputs),
                )
                for way in ways.of(self._told(held))
            ]
        return self._transitions[key]

    def _in_the_way(self, step: _Step, states: Sequence[_State], op: Op) -> Iterator[str]:
        refs = list(dict.fromkeys(op.operands))
        for state in states:
            before = state.tensors + step.enters
            held = self._told(tuple(-1 if at < 0 else before[at] for at in step.reads))
            for place in step.ways.in_the_way(held):
                memory = self._problem.graph.memory_of(refs[place])
                assert memory is not None
                yield memory

    def _regret(self, step: _Step, one: _Tensors, other: _Tensors) -> float:
        """Return what the remaining ops can cost more from the one state than from the other, at most; inf: they may do from the other
        what they may not do from the one.
        """
        return sum(
            self._regret_of(kind, left, a, b)
            for kind, left, a, b in zip(step.alive, step.reads_left, one, other, strict=True)
            if a != b
        )

    def _regret_of(self, kind: int, left: int, a: int, b: int) -> float:
        """Return the regret of one tensor: each read wants it in some layout, and a conversion is paid for once, so it is the sum over
        those layouts, as many as there are reads, for which the difference between the two prices is largest.
        """
        key = kind, left, a, b
        if key not in self._regrets:
            tensor, price = self._tensors[kind], self._problem.price
            one, other = self._held[a], self._held[b]
            if one[0] != other[0] and (tensor.tied or not self._offers(one[0], other[0], flows=tensor.flows)):
                self._regrets[key] = inf
            else:
                wanted = {*one[1], *other[1], other[0], *self._layouts(len(tensor.spec.shape))}
                differences = [_paid(tensor, one, want, price) - _paid(tensor, other, want, price) for want in wanted]
                self._regrets[key] = sum(sorted((d for d in differences if d > 0), reverse=True)[:left])
        return self._regrets[key]

    def _gap(self, step: _Step, one: _Tensors, other: _Tensors) -> float:
        """Return what it costs to convert the tensors of one state to those of another: an estimate of the regret that is mostly below
        it."""
        return sum(self._gap_between(kind, a, b) for kind, a, b in zip(step.alive, one, other, strict=True) if a != b)

    def _gap_between(self, kind: int, a: int, b: int) -> float:
        key = kind, a, b
        if key not in self._gaps:
            tensor = self._tensors[kind]
            (have, converted), (want, too) = self._held[a], self._held[b]
            if not tensor.may_be(have, want):
                self._gaps[key] = inf
            else:
                missing = {want, *too} - {have} - converted
                self._gaps[key] = sum(tensor.converting(have, layout, self._problem.price) for layout in missing)
        return self._gaps[key]

    def _offers(self, one: Layout, other: Layout, *, flows: bool) -> bool:
        """Return whether all strategies that read the other layout may read the one; those of some ops depend on what is cut already."""
        return (self._one_list or other.kind != "shard") and (flows or one != REPLICATE)

    def _layouts(self, dims: int) -> Iterator[Layout]:
        """All that may be asked for."""
        yield from _OTHERS
        for by in self._lists:
            yield from (sharded(dim, by) for dim in range(dims))

    def _wanted_cost(self, state: _State, alive: Sequence[Ref]) -> int:
        total = 0
        for ref, number in zip(alive, state.tensors, strict=True):
            have, converted = self._held[number]
            want = self._problem.wanted[ref]
            if want not in converted:
                total += self._tensors[self._kind(ref)].converting(have, want, self._problem.price)
        return total

    def _kind(self, ref: Ref) -> int:
        """Tensors of one kind are converted alike."""
        tensor = tensor_of(ref, self._problem, tied=self._problem.graph.memory_of(ref) in self._written)
        kind = tensor.bytes, len(tensor.spec.shape), tensor.flows, tensor.tied
        if kind not in self._kinds:
            self._kinds[kind] = len(self._tensors)
            self._tensors.append(tensor)
        return self._kinds[kind]

    def _number(self, held: Held) -> int:
        if held not in self._numbers:
            self._numbers[held] = len(self._held)
            self._held.append(held)
        return self._numbers[held]

    def _told(self, numbers: Sequence[int]) -> tuple[Held | None, ...]:
        return tuple(None if number < 0 else self._held[number] for number in numbers)


def _paid(tensor: Tensor, held: Held, want: Layout, price: Price) -> int:
    """By the next op that wants it so."""
    have, converted = held
    return 0 if want == have or want in converted else tensor.converting(have, want, price)

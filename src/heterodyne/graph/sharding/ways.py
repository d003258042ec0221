"""The ways to run an op, given how what it reads is laid out, and what each of them costs.

Of thousands of ops in a graph most are like others, so they share what is found here.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Final, NamedTuple, TypeAlias

from heterodyne.graph.ir import Argument, Op, Ref, TensorSpec
from heterodyne.graph.sharding.layout import COPY, REPLICATE, Layout, conversion
from heterodyne.graph.sharding.price import Price
from heterodyne.graph.sharding.problem import Mode, Problem
from heterodyne.graph.sharding.rule import OpStrategy, Rule
from heterodyne.graph.sharding.rules import rule_of
from heterodyne.graph.sharding.units import limits
from heterodyne.graph.size import Size

__all__ = ["GRAINS", "Held", "Tensor", "Way", "Ways", "tensor_of", "ways_of"]

GRAINS: Final = 1024
"""Costs are counted in parts of a byte as small as this, in whole numbers: sums of these do not depend on their order."""

Held: TypeAlias = tuple[Layout, frozenset[Layout]]
"""How a tensor is laid out, and to what it was converted at some cost."""


class Tensor(NamedTuple):
    """What matters of a tensor beside its layout.

    ``stored``: a parameter or buffer, ``weight``: a trained one of two dims or more; ``flows``: gradients flow into it; ``tied``: it is
    memory that the op which reads it writes into, or returns a view of.
    """

    spec: TensorSpec
    bytes: float
    stored: bool
    weight: bool
    flows: bool
    tied: bool

    def converting(self, have: Layout, want: Layout, price: Price) -> int:
        """Return what it costs, forward and backward."""
        steps = conversion(have, want, differentiable=self.flows)
        return grains(price.collective(steps.forward, self.bytes) + price.collective(steps.backward, self.bytes))

    def may_be(self, have: Layout, want: Layout) -> bool:
        """Return whether it may be laid out so for the op that reads it. Of what is tied a copy would take the change for itself."""
        return have == want or not self.tied or ({have, want} <= {REPLICATE, COPY} and not self.flows)


class Way(NamedTuple):
    """``held``: how what it reads is laid out afterwards, each tensor once."""

    strategy: OpStrategy
    cost: int
    held: tuple[Held, ...]


def grains(cost: float) -> int:
    """A cost in whole numbers."""
    return round(cost * GRAINS)


@dataclass(frozen=True, eq=False)
class Ways:
    """Args:
    op: one of those that are alike.
    tensors: what it reads, each once.
    operands: for each operand which of these it is.
    whole: it may not be cut at all.
    """

    op: Op
    rule: Rule
    tensors: tuple[Tensor, ...]
    operands: tuple[int, ...]
    mode: Mode
    letters: str
    whole: bool
    problem: Problem
    _found: dict[tuple[Held | None, ...], tuple[Way, ...]] = field(default_factory=dict)

    def of(self, held: tuple[Held | None, ...]) -> tuple[Way, ...]:
        """Those that are possible, of some that come to the same the cheapest. ``held``: of each tensor, None: it has not been read yet."""
        if held not in self._found:
            best: dict[object, Way] = {}
            for strategy in self._strategies(held):
                way = self._way(strategy, held)
                if way is not None:
                    key = way.held, strategy.outputs
                    if key not in best or way.cost < best[key].cost:
                        best[key] = way
            self._found[held] = tuple(best.values())
        return self._found[held]

    def in_the_way(self, held: tuple[Held | None, ...]) -> Iterator[int]:
        """The tensors that would have to be laid out in another way, and may not."""
        for strategy in self._strategies(held):
            for place, want in zip(self.operands, strategy.operands, strict=True):
                have = held[place]
                if have is not None and not self.tensors[place].may_be(have[0], want):
                    yield place

    def _way(self, strategy: OpStrategy, held: tuple[Held | None, ...]) -> Way | None:
        price = self.problem.price
        after = list(held)
        cost = self._work(strategy)
        for place, want in zip(self.operands, strategy.operands, strict=True):
            tensor = self.tensors[place]
            # A parameter or buffer lies as its first reader wants it.
            have, converted = after[place] or (want if want.kind == "shard" else COPY, frozenset())
            after[place] = have, converted
            if have == want or (want in converted and not tensor.tied):
                continue
            if not tensor.may_be(have, want):
                return None
            extra = tensor.converting(have, want, price)
            if extra:
                cost += extra
                after[place] = have, converted | {want}
        return Way(strategy, cost, tuple(one for one in after if one is not None))

    def _work(self, strategy: OpStrategy) -> int:
        samples, op, price = self.problem.samples, self.op, self.problem.price
        flops = op.flops_forward(samples) + op.flops_backward(samples)
        traffic = 3 * (op.bytes_read(samples) + op.bytes_written(samples))
        inside = self._exchanged(strategy) if strategy.divides else 0.0
        return grains(price.work(flops, traffic, divided=strategy.divides) + inside)

    def _exchanged(self, strategy: OpStrategy) -> float:
        """Return what the op itself exchanges: maxima and sums; or rows, there and back, and their gradients the same ways."""
        price = self.problem.price
        if strategy.name in self.rule.together:
            ways = 4 if any(self.op.differentiable) else 2
            # Each device sends of its own rows alone.
            size = self.rule.together[strategy.name](self.problem.samples) / price.members
            return ways * price.collective("all_to_all", size)
        return 3 * price.latency_bytes if strategy.name in self.rule.exchanged else 0.0

    def _strategies(self, held: tuple[Held | None, ...]) -> Iterable[OpStrategy]:
        """Those that its mode allows."""
        rule, mode = self.rule, self.mode
        if rule.only:
            return [rule.strategy(rule.only, mode.by if mode.kind == "replicate" else 0)]
        if self.whole:
            return [rule.whole]
        letters = {x: self._lists(x, held) for x in self.letters}
        batch = [x for x in letters if self._follows_the_batch(x)]
        if mode.kind == "replicate":
            by_samples = [rule.strategy(x, mode.by) for x in batch[:1] if mode.by in letters[x]]
            if by_samples and not (self.op.memory or self.op.writes):
                return by_samples
            # What is done in place is done to it as it lies.
            as_it_lies = [rule.strategy(x, by) for x in letters for by in letters[x] if self._cuts(x, held)]
            return [*by_samples, *as_it_lies, rule.whole, *rule.in_parts]
        if self._cut_for_nothing(held):
            return [rule.whole]
        found = [rule.strategy(x, by) for x in letters for by in letters[x]]
        pairs = [pair for pair in rule.together if set(pair) <= set(letters)]
        found += [rule.both(pair, by) for pair in pairs for by in product(*(letters[x] for x in pair))]
        if mode.kind == "split":
            heavy = [strategy for strategy in found if self._cuts_a_weight(strategy)]
            if heavy:
                return heavy
        else:
            # Samples stay together, but for what has to be cut by samples (statistics) and what is done to that in place.
            free = [x for x in letters if x not in batch or self._cuts(x, held)]
            found = [s for s in found if s.name in free and not self._cuts_a_weight(s)]
        return [rule.whole, *found, *rule.in_parts]

    def _cut_for_nothing(self, held: tuple[Held | None, ...]) -> bool:
        """Masks, positions and the like: whole tensors without gradients, which are as well cut later, where they are read, for nothing."""
        if any(self.op.differentiable) or any(tensor.stored for tensor in self.tensors):
            return False
        return all(one is not None and one[0] == REPLICATE for one in held)

    def _lists(self, letter: str, held: tuple[Held | None, ...]) -> list[int]:
        """The lists of shares by which a letter may be cut: its region's own, and those by which an operand is cut there already."""
        lists = sorted({self.mode.by, *(layout.by for layout in self._cuts(letter, held))})
        if letter not in self.rule.filled:
            return lists
        # A device may be left without any of what each should have some of.
        return [] if self._follows_the_batch(letter) else [by for by in lists if by not in self.problem.gaps]

    def _cuts(self, letter: str, held: tuple[Held | None, ...]) -> list[Layout]:
        """Return how operands are laid out that are cut along a letter already."""
        lies = [(held[place], dims) for place, dims in zip(self.operands, self.rule.operands, strict=True)]
        return [one[0] for one, dims in lies if one and one[0].kind == "shard" and dims[one[0].dim] == letter]

    def _follows_the_batch(self, letter: str) -> bool:
        specs = [self.tensors[place].spec for place in self.operands] + list(self.op.outputs)
        named = zip((*self.rule.operands, *self.rule.outputs), specs, strict=True)
        return any(letter in dims and not spec.shape[dims.index(letter)].is_constant for dims, spec in named)

    def _cuts_a_weight(self, strategy: OpStrategy) -> bool:
        """Return whether it divides a trained parameter of two dims or more."""
        operands = zip(self.operands, strategy.operands, strict=True)
        return any(layout.kind == "shard" and self.tensors[place].weight for place, layout in operands)


def tensor_of(ref: Ref, problem: Problem, *, tied: bool) -> Tensor:
    """Return what matters of a tensor."""
    graph = problem.graph
    spec, stored = graph.spec(ref), ref.name in graph.stored
    return Tensor(
        spec=spec,
        bytes=spec.bytes(problem.samples),
        stored=stored,
        weight=stored and graph.flows(ref) and len(spec.shape) > 1,
        flows=graph.flows(ref),
        tied=tied,
    )


def ways_of(problem: Problem, whole: frozenset[str]) -> list[Ways]:
    """Those of each op. ``whole``: memories whose tensors may not be cut."""
    graph = problem.graph
    forbidden: dict[str, set[str]] = {}
    for name, letter in problem.forbidden:
        forbidden.setdefault(name, set()).add(letter)
    alike: dict[object, Ways] = {}
    found = []
    for op in problem.ops:
        refs = tuple(dict.fromkeys(op.operands))
        tensors = tuple(tensor_of(ref, problem, tied=_is_tied(ref, op, problem)) for ref in refs)
        mode, not_these = problem.modes[op.name], frozenset(forbidden.get(op.name, ()))
        pinned = bool(whole.intersection({op.memory, *op.writes}))
        key = (
            (op.target, _numbered(tuple(value for _, value in op.arguments), refs)),
            (tensors, op.outputs, op.differentiable, bool(op.memory), bool(op.writes)),
            (op.flops_forward, op.flops_backward, op.bytes_read, op.bytes_written),
            (mode, not_these, pinned),
        )
        if key not in alike:
            rule = rule_of(op, graph)
            alike[key] = Ways(
                op=op,
                rule=rule,
                tensors=tensors,
                operands=tuple(refs.index(ref) for ref in op.operands),
                mode=mode,
                letters="".join(
                    x for x in rule.letters if x not in not_these and _is_worth_it(x, op, rule, problem, tensors)
                ),
                whole=pinned,
                problem=problem,
            )
        found.append(alike[key])
    return found


def _is_tied(ref: Ref, op: Op, problem: Problem) -> bool:
    memory = problem.graph.memory_of(ref)
    return memory is not None and (memory in op.writes or memory == op.memory)


def _numbered(value: Argument, refs: Sequence[Ref]) -> object:
    """An argument with numbers for the tensors that it names."""
    if isinstance(value, Ref):
        return "tensor", refs.index(value)
    return tuple(_numbered(entry, refs) for entry in value) if isinstance(value, tuple) else (type(value), value)


def _is_worth_it(letter: str, op: Op, rule: Rule, problem: Problem, tensors: Sequence[Tensor]) -> bool:
    """Not where one device would have it all; where that is a weight, it has to be said."""
    weights = [ref for ref, tensor in zip(dict.fromkeys(op.operands), tensors, strict=True) if tensor.weight]
    named = zip(op.operands, rule.operands, strict=True)
    return limits(op, rule, letter, problem.graph) != Size.of(1) or any(
        ref in weights and letter in dims for ref, dims in named
    )

"""How a stage is laid out on its devices: what the plan says, worked out to the last tensor.

A pure function of the graph and the stage, so planner, simulator and every rank come to the same result, and a plan need not list
what follows from it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise

from heterodyne.graph.ir import ModelGraph, Op, Ref
from heterodyne.graph.sharding.dealing import dealt, dealt_to_all
from heterodyne.graph.sharding.layout import Conversion, Layout, conversion
from heterodyne.graph.sharding.problem import Problem
from heterodyne.graph.sharding.rule import WHOLLY, OpStrategy
from heterodyne.graph.sharding.rules import rule_of
from heterodyne.graph.sharding.solve import Choice, solve
from heterodyne.graph.sharding.units import UnitFamilies, UnitFamily, families_of, limits
from heterodyne.graph.size import Size

__all__ = ["Exchange", "Narrow", "Sharding", "shard"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Exchange:
    """A conversion ahead of an op (of what is wanted at the end: ``before`` is None)."""

    before: str | None
    tensor: Ref
    have: Layout
    want: Layout
    steps: Conversion
    bytes: Size


@dataclass(frozen=True, kw_only=True, slots=True)
class Narrow:
    """An op that could not be cut as wide as was asked for: it has ``units`` for more devices than that."""

    op: str
    letter: str
    units: int


@dataclass(frozen=True, kw_only=True)
class Sharding:
    """Args:
    strategies: how each op runs, by name.
    layouts: how each tensor is laid out when it is made, received or kept.
    families: in what units it is cut.
    shares: the lists of shares that cuts go by.
    wanted: how what leaves the stage is laid out.
    exchanges: in the order in which the forward has them.
    narrow: ops that were not cut because they have too few units.
    inner: the same along the axes inside of this one, by each of whose members it holds; None: there are none.
    """

    strategies: Mapping[str, OpStrategy]
    layouts: Mapping[Ref, Layout]
    families: UnitFamilies
    shares: tuple[tuple[int, ...], ...]
    wanted: Mapping[Ref, Layout]
    exchanges: tuple[Exchange, ...]
    narrow: tuple[Narrow, ...] = ()
    inner: Sharding | None = None
    graph: ModelGraph = field(repr=False)

    @property
    def axes(self) -> tuple[Sharding, ...]:
        """Along each axis, outermost first, which is this one."""
        return (self, *(self.inner.axes if self.inner is not None else ()))

    @property
    def members(self) -> int:
        return len(self.shares[0])

    @property
    def divides(self) -> bool:
        """Return whether the devices divide any op along this axis."""
        return any(strategy.divides for strategy in self.strategies.values())

    def sizes(self, ref: Ref, layout: Layout, samples: int) -> tuple[int, ...]:
        """Return the sizes of each device's slice of a tensor in the dim that is cut."""
        full = int(self.graph.spec(ref).shape[layout.dim](samples))
        of_family = self.families.units(ref, layout)
        units = int(of_family(samples))
        # Samples are dealt out as the stage's neighbours expect it, so somebody may go without.
        deal = dealt_to_all if of_family.is_constant else dealt
        return tuple(count * (full // max(1, units)) for count in deal(units, self.shares[layout.by]))

    def stored(self, name: str) -> tuple[int, tuple[int, ...]] | None:
        """For a parameter or buffer that is cut its dim and the sizes of the slices; None for one that every device has."""
        layout = self.layouts.get(Ref(name))
        if layout is None or layout.kind != "shard":
            return None
        return layout.dim, self.sizes(Ref(name), layout, 1)

    def showing(self, graph: ModelGraph, shown: Mapping[str, Ref]) -> Sharding:
        """Return the same for the graph with ops that show tensors and leave their layouts as they are; see
        `heterodyne.graph.module_outputs`."""
        if not shown:
            return self
        layouts = {Ref(name): self.layouts[ref] for name, ref in shown.items() if ref in self.layouts}
        cuts = {(ref, layout): family for (ref, layout), family in self.families.of.items()}
        of_shown: dict[Ref, list[str]] = {}
        for name, ref in shown.items():
            of_shown.setdefault(ref, []).append(name)
        more = {(Ref(name), layout): f for (ref, layout), f in cuts.items() for name in of_shown.get(ref, ())}
        return replace(
            self,
            strategies={
                **self.strategies,
                **{ref.name: OpStrategy(WHOLLY, (at,), (at,)) for ref, at in layouts.items()},
            },
            layouts={**self.layouts, **layouts},
            families=UnitFamilies(of={**cuts, **more}),
            wanted={
                **self.wanted,
                **{Ref(name): self.wanted[ref] for name, ref in shown.items() if ref in self.wanted},
            },
            inner=None if self.inner is None else self.inner.showing(graph, shown),
            graph=graph,
        )

    def boxes(self, name: str) -> tuple[tuple[tuple[int, int, int], ...], ...]:
        """For each device the slices ``(dim, first, stop)`` of a parameter or buffer that it has, by dim; () if it has all of it."""
        found: list[tuple[tuple[int, int, int], ...]] = [()]
        for axis in self.axes:
            cut = axis.stored(name)
            slices: list[tuple[tuple[int, int, int], ...]] = [()] * axis.members
            if cut is not None:
                borders = pairwise(accumulate(cut[1], initial=0))
                slices = [((cut[0], first, stop),) for first, stop in borders]
            found = [tuple(sorted((*box, *own))) for box in found for own in slices]
        return tuple(found)


def shard(problem: Problem, shares: Sequence[Sequence[int]], fixed: Mapping[tuple[Ref, Layout], Size]) -> Sharding:
    """Work it out. ``shares``: the lists that modes name; ``fixed``: units that were agreed on outside of the stage."""
    rules = {op.name: rule_of(op, problem.graph) for op in problem.ops}
    problem = replace(problem, gaps=frozenset(number for number, row in enumerate(shares) if not all(row)))
    narrow: list[Narrow] = []
    while True:
        choice = solve(problem)
        families = families_of(problem.graph, rules, choice.strategies, fixed)
        too_narrow = _too_narrow(problem, families, shares)
        if not too_narrow:
            break
        narrow += too_narrow
        problem = replace(problem, forbidden=problem.forbidden | {(entry.op, entry.letter) for entry in too_narrow})
    return Sharding(
        strategies=choice.strategies,
        layouts=choice.layouts,
        families=families,
        shares=tuple(tuple(row) for row in shares),
        wanted=problem.wanted,
        exchanges=tuple(_exchanges(problem, choice)),
        narrow=tuple(narrow),
        graph=problem.graph,
    )


def _too_narrow(problem: Problem, families: UnitFamilies, shares: Sequence[Sequence[int]]) -> list[Narrow]:
    """Ops whose cut leaves a device that has a share without any of it. Samples may be fewer than devices."""
    found: list[Narrow] = []
    for family in dict.fromkeys(families.of.values()):
        wide = sum(share > 0 for share in shares[family.by])
        if not family.units.is_constant or int(family.units(1)) >= wide:
            continue
        found += _at_fault(problem, family, wide)
    return found


def _at_fault(problem: Problem, family: UnitFamily, wide: int) -> list[Narrow]:
    """The ops that by themselves have too few units; all of the family, if they have too few only together."""
    graph = problem.graph
    each = [
        Narrow(op=name, letter=letter, units=_units_of(graph.op_by_name[name], letter, graph))
        for name, letter in family.cuts
    ]
    return [entry for entry in each if entry.units < wide] or each


def _units_of(op: Op, letter: str, graph: ModelGraph) -> int:
    units = limits(op, rule_of(op, graph), letter, graph)
    return int(units(1)) if units.is_constant else 2**31


def _exchanges(problem: Problem, choice: Choice) -> list[Exchange]:
    """Return what is exchanged, each conversion of a tensor once, until something writes into its memory."""
    graph, found = problem.graph, []
    done: set[tuple[Ref, Layout]] = set()

    def add(before: str | None, ref: Ref, want: Layout) -> None:
        have = choice.layouts[ref]
        if have == want or (ref, want) in done:
            return
        done.add((ref, want))
        steps = conversion(have, want, differentiable=graph.flows(ref))
        found.append(
            Exchange(before=before, tensor=ref, have=have, want=want, steps=steps, bytes=graph.spec(ref).bytes)
        )

    for op in problem.ops:
        for ref, want in zip(op.operands, choice.strategies[op.name].operands, strict=True):
            add(op.name, ref, want)
        if op.writes:
            done = {(ref, want) for ref, want in done if graph.memory_of(ref) not in op.writes}
    for ref, want in problem.wanted.items():
        add(None, ref, want)
    return found

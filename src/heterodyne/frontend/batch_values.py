"""Which values of a graph depend on the batch: on its samples, on how many they are, or on the place of a sample among them.

A plan gives each device some of the samples, numbered from 0. So a value that is computed from the number of samples
(``h * x.shape[0]``) or from a sample's place (``torch.arange(x.shape[0])``) is another one there than on one device.

Sizes that only make shapes are harmless: a tensor of zeros for each sample, an ``expand``, a ``view``. So is a place that
only chooses a sample's own row: ``hidden[torch.arange(len(hidden)), last]``. A place is therefore followed as ``scale * i + rest``
for sample i as long as it is one (`AffineIndex`), and forgotten where it indexes a tensor that has ``scale`` rows for each sample.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, fx
from torch._ops import OpOverload

from heterodyne.frontend.arguments import argument, mutates, operator_name
from heterodyne.frontend.export import Traced
from heterodyne.frontend.flat_graph import tensors_of
from heterodyne.frontend.numbered_rows import numbered_rows
from heterodyne.frontend.row_places import MOVES, AffineIndex, Dependence, bounds, counted, is_order, is_own, times
from heterodyne.frontend.sample_order import samples_in
from heterodyne.frontend.sizes import degree
from heterodyne.frontend.sizes_as_values import cuts_by_size, follows, is_size, is_size_as_value, runs_along_rows
from heterodyne.graph.op_kinds import FILLED_LIKE, NEW

__all__ = ["BatchValues", "batch_values", "with_bases"]


@dataclass(frozen=True, kw_only=True)
class BatchValues:
    """Of the nodes that return tensors:

    Args:
        samples: those whose values depend on the values of the samples: of inputs that follow the batch.
        random: those whose values depend on random draws.
        follows: those whose values or shapes depend on the batch in any way: ``samples``, and what is made with a size that
            follows the batch (``torch.ones(B, L)``, ``weight.expand(B, -1)``), and what is computed from it. A sum over such a tensor
            is a count of the batch.
        dependent: those whose values depend on the number of the samples or on their places, so that a part of a batch has others.
        places: those that hold places and nothing else yet. Whether they do harm depends on who reads them.
    """

    samples: frozenset[fx.Node]
    random: frozenset[fx.Node]
    follows: frozenset[fx.Node]
    dependent: Mapping[fx.Node, Dependence]
    places: Mapping[fx.Node, AffineIndex]


def batch_values(traced: Traced, *, known: Collection[fx.Node] = ()) -> BatchValues:
    """Follow samples, sizes and places through the graph.

    Args:
        known: nodes that are taken care of elsewhere, as the reader of the loss does for what divides it: their results count as
            not dependent on the number of samples.
    """
    found = _Values(traced, frozenset(known))
    found.run()
    return BatchValues(
        samples=frozenset(found.samples),
        random=frozenset(found.random),
        follows=frozenset(found.follows),
        dependent=found.dependent,
        places=found.places,
    )


# They read no values of their first tensor, but for what they are told.
_SHAPE_ONLY = NEW | FILLED_LIKE | {"rand_like", "randint_like", "randn_like"}
# Of rows that are all equal they return one, whatever their number.
_OF_EQUAL_ROWS = frozenset({
    "all", "amax", "amin", "any", "getitem", "index", "index_select", "max", "mean", "median", "min", "narrow", "select", "slice",
    "split", "chunk", "unbind", "unflatten", "gather", "expand_as", "view_as", "type_as", "reshape_as", "to",
})  # fmt: skip
# They depend on how many rows there are along ``dim``, also where the result has as many.
_ALONG = frozenset({
    "_log_softmax", "_softmax", "argsort", "cumprod", "cumsum", "log_softmax", "logcumsumexp", "softmax", "sort", "topk",
})  # fmt: skip


class _Values:
    """One walk through the graph, in order."""

    def __init__(self, traced: Traced, known: frozenset[fx.Node]) -> None:
        self._traced = traced
        self._order = samples_in(traced.graph)
        self._known = known
        self.samples: set[fx.Node] = set()
        self.random: set[fx.Node] = set()
        self.follows: set[fx.Node] = set()
        self.dependent: dict[fx.Node, Dependence] = {}
        self.places: dict[fx.Node, AffineIndex] = {}

    def run(self) -> None:
        for node, role in self._traced.roles.items():
            if role.kind == "input" and follows(node):
                self.samples.add(node)
                self.follows.add(node)
        for node in self._traced.graph.nodes:
            if node.op == "call_function" and tensors_of(node):
                self._visit(node)

    def _visit(self, node: fx.Node) -> None:
        name = operator_name(node)
        sources = [n for n in node.all_input_nodes if tensors_of(n)]
        read = sources[1:] if name in _SHAPE_ONLY else sources
        changed = (node, *(n for c in mutates(node) for n in with_bases(c)))
        if any(n in self.samples for n in read):
            self.samples.update(changed)
        if _draws(node) or any(n in self.random for n in read):
            self.random.update(changed)
        if any(n in self.follows for n in read) or follows(node) or any(is_size(n) for n in node.all_input_nodes):
            self.follows.update(changed)
        if node in self._known:
            return
        found = self._found(node, name, read)
        for one in changed:
            if isinstance(found, Dependence):
                self.dependent[one] = found
            elif isinstance(found, AffineIndex):
                self.places[one] = found

    def _found(self, node: fx.Node, name: str, read: list[fx.Node]) -> Dependence | AffineIndex | None:
        inherited = next((self.dependent[n] for n in read if n in self.dependent), None)
        if inherited is not None:
            return inherited
        if name == "arange":
            return counted(node)
        if any(n in self.places for n in read):
            return self._of_places(node, name, read)
        if is_size_as_value(node, name):
            return Dependence(on="size", cause=node)
        if cuts_by_size(node, name, self._order):
            return Dependence(on="place", cause=node)
        if node in self.samples or node in self.random:
            return None  # how samples see each other is for `refuse_coupling`
        return self._of_equal_rows(node, name, read)

    def _of_equal_rows(self, node: fx.Node, name: str, read: list[fx.Node]) -> Dependence | None:
        """Return what is computed from tensors whose rows are the same for each sample."""
        if name in ("linspace", "logspace", "eye", "randperm", "tril_indices", "triu_indices") and follows(node):
            return Dependence(on="place", cause=node)
        if any(degree(t) > 1 for t in tensors_of(node)) or (name in _ALONG and runs_along_rows(node)):
            return Dependence(on="place", cause=node)
        lost = any(follows(n) for n in read) and not follows(node) and node.target is not operator.getitem
        return Dependence(on="size", cause=node) if lost and name not in _OF_EQUAL_ROWS else None

    # ---- places -----------------------------------------------------------------------------------------------------

    def _of_places(self, node: fx.Node, name: str, read: list[fx.Node]) -> AffineIndex | Dependence | None:
        refused = Dependence(on="place", cause=node)
        if name == "embedding_bag":
            return None if self._own_bags(node, read) else refused
        if any(degree(t) != 1 for t in tensors_of(node)):
            return refused
        source = node.args[0] if node.target is operator.getitem else argument(node, "self")
        if not isinstance(source, fx.Node):
            return refused
        if node.target is operator.getitem and operator_name(read[0]) in MOVES:
            return self.places[source]
        if source not in self.places:
            if name in ("add", "add_") and argument(node, "alpha") == 1:
                return self._sum(self.places[_other(node, source)], source) or refused
            return None if self._chosen(node) or self._is_inverse_order(node, name) else refused
        place, other = self.places[source], argument(node, "other")
        if name in MOVES:
            return place if all(n is source or n not in self.places for n in read) else refused
        if name == "remainder" and isinstance(other, int) and other > 0 and place.scale % other == 0:
            return None  # the same numbers for each sample
        return self._arithmetic(node, name, place) or refused

    def _arithmetic(self, node: fx.Node, name: str, place: AffineIndex) -> AffineIndex | None:
        other = argument(node, "other")
        if name in ("add", "add_") and argument(node, "alpha") == 1:
            if isinstance(other, fx.Node):
                return None if other in self.places else self._sum(place, other)
            return place.shifted(other, other) if isinstance(other, int) else None
        if not isinstance(other, int) or other <= 0:
            return None
        if name in ("mul", "mul_"):
            return AffineIndex(scale=place.scale * other, low=times(place.low, other), high=times(place.high, other))
        if place.scale % other:
            return None
        if name == "floor_divide" or (name == "div" and argument(node, "rounding_mode") == "floor"):
            low, high = place.low, place.high
            return AffineIndex(
                scale=place.scale // other,
                low=None if low is None else low // other,
                high=None if high is None else high // other,
            )
        return None

    def _sum(self, place: AffineIndex, other: fx.Node) -> AffineIndex | None:
        value = other.meta["val"]
        if not isinstance(value, Tensor) or value.is_floating_point() or other in self.dependent:
            return None
        low, high = bounds(other)
        return place.shifted(low, high)

    def _is_inverse_order(self, node: fx.Node, name: str) -> bool:
        """Return whether places are written in a sorted order, which gives the order back: what `refuse_coupling` looks at itself."""
        if name not in ("index_put", "index_put_", "scatter", "scatter_"):
            return False
        given = argument(node, "indices") if "indices" in _argument_names(node) else [argument(node, "index")]
        return all(index is None or (index not in self.places and is_order(index)) for index in given)

    def _own_bags(self, node: fx.Node, read: list[fx.Node]) -> bool:
        """Return whether places only say where the bag of each sample begins: with its first row, as `nn.EmbeddingBag` has it of [B, L]."""
        begins, rows = argument(node, "offsets"), self._order[argument(node, "indices")]
        place = self.places.get(begins)
        return (
            place == AffineIndex(scale=rows.rows, low=0, high=0)
            and rows.ordered
            and not argument(node, "include_last_offset")
            and all(n is begins or n not in self.places for n in read)
            and all(taken.args[1] == 0 or not taken.users for taken in node.users)
        )

    def _chosen(self, node: fx.Node) -> bool:
        """Return whether places only choose rows of the samples that they belong to."""
        if operator_name(node) == "repeat_interleave":
            return False  # places as counts
        used = [n for n in numbered_rows(node) if n.index in self.places]
        others = [n for n in node.all_input_nodes if n in self.places]
        return len(others) == len(used) > 0 and all(
            n.dim is not None and self._order[n.source].groups <= 1 and is_own(n.source, n.dim, self.places[n.index])
            for n in used
        )


def _argument_names(node: fx.Node) -> list[str]:
    return [a.name for a in node.target._schema.arguments] if isinstance(node.target, OpOverload) else []


def _other(node: fx.Node, first: fx.Node) -> fx.Node:
    return next(n for n in node.all_input_nodes if n is not first)


def _draws(node: fx.Node) -> bool:
    return isinstance(node.target, OpOverload) and torch.Tag.nondeterministic_seeded in node.target.tags


def with_bases(node: fx.Node) -> Iterator[fx.Node]:
    """A tensor that is written into, and what it is a view of."""
    yield node
    while isinstance(node.target, OpOverload) and node.all_input_nodes:
        first = node.target._schema.arguments[0]
        if first.alias_info is None:
            return
        node = node.all_input_nodes[0]
        yield node

"""How the loss is averaged, read from the graph.

Parts of a batch on different devices give the gradient of the whole batch only if numerators are added and divided by the
denominators of the whole batch. The walk goes back from the loss, through everything that is linear in sums over the samples, until
it finds the reductions, and notes what each of them divides by: nothing (a sum), the number of samples, or a count in the data.

    one denominator for all terms    a part's loss is weighted by its denominator over that of the batch; the model runs as it is
    several, or terms without one    the graph is rewritten (`split_loss`): each term is divided by its denominator of the whole batch
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from heterodyne.errors import CaptureError
from heterodyne.frontend.arguments import argument, mutates, operator_name
from heterodyne.frontend.coupling import CoupledError, coupled, refuse_coupling
from heterodyne.frontend.denominator import Denominator, Statistic
from heterodyne.frontend.export import Traced
from heterodyne.frontend.faults import line_of
from heterodyne.frontend.flat_graph import tensors_of
from heterodyne.frontend.loss_reading import Division, LossReading, LossReduction
from heterodyne.frontend.sizes import degree, proportional, size_of, spec_of
from heterodyne.frontend.sizes_as_values import follows
from heterodyne.graph.op_kinds import (
    CASTS,
    COPIES,
    JOINS,
    LABELLED_LOSSES,
    LIKE,
    RESHAPES,
    SAME_VALUES,
    SLICES,
    SQUEEZES,
)

__all__ = ["LossWalk", "read_loss"]


_CONSTANT = LossReduction(kind="constant")
_SUM = LossReduction(kind="quotient")
_SAMPLES = LossReduction(kind="quotient", samples=1)
_ADDED = LossReduction(kind="added")

_LINEAR = SAME_VALUES | LIKE | SLICES | JOINS | {"diagonal", "getitem", "mul", "neg"}
_ADDS = frozenset({"add", "add_", "sub", "sub_", "rsub"})
_SCALARS = COPIES | CASTS | RESHAPES | SQUEEZES | {"type_as"}
"""What a denominator may pass through: it has one element."""


def read_loss(traced: Traced) -> LossReading:
    """The averaging of the traced loss. Raises CaptureError with the line of the op that defies it."""
    walk = LossWalk(traced)
    found = walk.reduction(traced.loss)
    if found.kind == "constant":
        raise CaptureError("the loss does not depend on the batch; there is nothing to train on")
    refuse_coupling(traced, walk.passed)
    return LossReading(reduction=found, divisions=tuple(walk.divisions), shares=tuple(walk.shares))


class LossWalk:
    """The walk back from the loss. What it passed through is known to be linear in sums over the samples."""

    def __init__(self, traced: Traced) -> None:
        self._traced = traced
        self.passed: set[fx.Node] = set()
        self.divisions: list[Division] = []
        self.shares: list[tuple[fx.Node, fx.Node]] = []
        self.from_batch = _from_batch(traced)
        self._from_parameters = _descendants(traced, {n for n, r in traced.roles.items() if r.kind == "parameter"})
        self._structures: dict[Any, int] = {}
        self._numbers: dict[fx.Node, int] = {}
        self._known: dict[fx.Node, LossReduction] = {}

    def reduction(self, node: fx.Node) -> LossReduction:
        """Return how a node whose shape does not follow the batch depends on the samples."""
        if node not in self.from_batch:
            return _CONSTANT
        if node not in self._known:
            self.passed.add(node)
            rule: Callable[[fx.Node], LossReduction | None] | None = getattr(self, f"_{operator_name(node)}", None)
            found = rule(node) if rule is not None else self._general(node)
            if found is None:
                raise self._unknown(node)
            self._known[node] = found
        return self._known[node]

    def _general(self, node: fx.Node) -> LossReduction | None:
        name = operator_name(node)
        if name in LABELLED_LOSSES:
            return self._labelled(node)
        if argument(node, "reduction") in (1, 2):
            return self._reduced(node, mean=argument(node, "reduction") == 1)
        if name in _LINEAR or node.target is operator.getitem:
            return self._combined(node, [n for n in node.all_input_nodes if tensors_of(n)])
        return None

    # ---- what adds terms ------------------------------------------------------------------------------------------

    def _combined(self, node: fx.Node, operands: list[fx.Node]) -> LossReduction | None:
        """Operands that are added, put beside each other, or (all but one of them constant) multiplied."""
        if any(follows(n) for n in operands):
            return None
        found = {n: self.reduction(n) for n in operands}
        varying = [r for r in found.values() if r.kind != "constant"]
        if operator_name(node) in ("mul", "mul_"):
            return varying[0] if len(varying) == 1 else None
        shifts = dict.fromkeys([s for r in varying for s in r.shifts])
        shifts.update({(node, n): None for n, r in found.items() if r.kind == "constant"})
        same = len({(r.kind, r.counts) for r in varying}) == 1
        if same and (not shifts or (varying[0].weights_add_up and varying[0].kind != "added")):
            return replace(varying[0], divisions=_common(varying), shifts=tuple(shifts))
        return self._split(node, found)

    def _split(self, node: fx.Node, operands: dict[fx.Node, LossReduction]) -> LossReduction:
        """Make each operand its part of the value for the whole batch, so that the values of parts of the batch add up."""
        for operand, found in operands.items():
            if found.kind == "added":
                continue
            if found.samples not in (0, 1):
                raise self._unknown(operand)
            self._divide(found.divisions)
            if found.kind == "constant" or found.samples == 1:
                self.shares.append((node, operand))
                continue
            for at, term in found.shifts:
                if term is None:
                    raise self._number(at)
                self.shares.append((at, term))
        return _ADDED

    def _divide(self, divisions: tuple[Division, ...]) -> None:
        self.divisions += [division for division in divisions if division not in self.divisions]

    def _mul(self, node: fx.Node) -> LossReduction | None:
        found = self._combined(node, [n for n in node.all_input_nodes if tensors_of(n)])
        for size in (n.meta.get("val") for n in node.all_input_nodes if not tensors_of(n)):
            if isinstance(size, torch.SymFloat):
                return None
            if isinstance(size, torch.SymInt):
                found = self._times_samples(found, size, -1)
        return found

    _mul_ = _mul

    def _times_samples(self, found: LossReduction | None, size: torch.SymInt, power: int) -> LossReduction | None:
        """Divided by the number of samples (or a multiple of it) to some power."""
        if found is None or found.kind != "quotient" or found.shifts or not proportional(size_of(size)):
            return None
        return replace(found, samples=found.samples + power)

    def _add(self, node: fx.Node) -> LossReduction | None:
        operands = [n for n in node.all_input_nodes if tensors_of(n)]
        found = self._combined(node, operands)
        if found is None or not _has_number(node):
            return found
        if found.kind == "added" or not found.weights_add_up:
            raise self._number(node)
        return replace(found, shifts=(*found.shifts, (node, None)))

    def _number(self, node: fx.Node) -> CaptureError:
        if not self._ends_in_the_loss(node):
            return self._unknown(node)
        return CaptureError(
            f"{self._place(node)}the loss adds a number to a sum over the samples; each part of the batch would add it. Leave the "
            "number out, since it has no gradient."
        )

    def _ends_in_the_loss(self, node: fx.Node) -> bool:
        """Return whether a term is only added to others, or multiplied by constants, until it is the loss."""
        while node is not self._traced.loss:
            users = list(node.users)
            if len(users) != 1:
                return False
            (user,) = users
            others = [n for n in user.all_input_nodes if n is not node]
            adds = operator_name(user) in _ADDS
            if not adds and (operator_name(user) not in {*_LINEAR, "div", "div_"} or self.from_batch & set(others)):
                return False
            node = user
        return True

    _rsub = _sub = _add_ = _sub_ = _add

    # ---- what divides ---------------------------------------------------------------------------------------------

    def _div(self, node: fx.Node) -> LossReduction | None:
        numerator, denominator = node.args[:2]
        if not isinstance(numerator, fx.Node) or follows(numerator):
            return None
        return self._divided(node, self.reduction(numerator), denominator)

    _div_ = _true_divide = _div

    def _divided(self, node: fx.Node, top: LossReduction, denominator: Any) -> LossReduction | None:
        if not isinstance(denominator, fx.Node):
            return top
        size = denominator.meta.get("val")
        if isinstance(size, torch.SymInt):
            return self._times_samples(top, size, 1)
        if isinstance(size, int) or (tensors_of(denominator) and denominator not in self.from_batch):
            return top
        if not tensors_of(denominator) or follows(denominator) or top.kind != "quotient" or top.shifts:
            return None
        found = self._denominator(node, denominator)
        division = Division(node=node, denominator=found, argument=denominator)
        if found.shape.count(1) == len(found.shape):
            return replace(top, divisions=(*top.divisions, division))
        if top.samples not in (0, 1):
            return None
        self._divide((*top.divisions, division))
        self.shares += [(node, argument) for argument in node.all_input_nodes[:1] if top.samples == 1]
        return _ADDED

    def _denominator(self, node: fx.Node, value: fx.Node) -> Denominator:
        """Return what divides, as a function of sums over the samples; each part of the batch knows its own, and they add up."""
        statistics: dict[fx.Node, Statistic] = {}
        self._refuse_parameters(node, value)
        self._collect(value, statistics)
        inner = value
        while inner not in statistics and operator_name(inner) in _SCALARS:
            (inner, *_) = [n for n in inner.all_input_nodes if tensors_of(n)]
        itself = inner in statistics and not statistics[inner].mean
        return Denominator(
            value=None if itself and not value.meta["val"].dim() else value,
            statistics=tuple(statistics.values()),
            key=self._structure(value),
            shape=tuple(value.meta["val"].shape),
            double=value.meta["val"].dtype is torch.float64,
        )

    def _collect(self, node: fx.Node, statistics: dict[fx.Node, Statistic]) -> None:
        """The sums over the samples that a value is computed from."""
        if node not in self.from_batch or node in statistics or not tensors_of(node):
            return
        if follows(node) or node.op != "call_function":
            raise self._unknown(node)
        found = self.sum_of_samples(node)
        if found is not None:
            statistics[node] = Statistic(node=node, mean=found.samples == 1)
            return
        self.passed.add(node)
        for operand in node.all_input_nodes:
            self._collect(operand, statistics)

    def sum_of_samples(self, node: fx.Node) -> LossReduction | None:
        """Return what a node is if it is a sum or a mean over the samples; None, without a trace, if it is anything else."""
        before = set(self.passed), list(self.divisions), list(self.shares), dict(self._known)
        try:
            found = self.reduction(node)
        except CaptureError:
            found = _ADDED
        if found.kind == "quotient" and found.samples in (0, 1) and not found.divisions and not found.shifts:
            return found
        self.passed, self.divisions, self.shares, self._known = before
        return None

    # ---- what reduces ---------------------------------------------------------------------------------------------

    def _sum(self, node: fx.Node) -> LossReduction | None:
        return self._reduced(node, mean=False)

    def _mean(self, node: fx.Node) -> LossReduction | None:
        return self._reduced(node, mean=True)

    def _histc(self, node: fx.Node) -> LossReduction | None:
        return _SUM if any(follows(n) for n in node.all_input_nodes) else None

    _bincount = _histc

    def _scatter_add_(self, node: fx.Node) -> LossReduction | None:
        """Values of samples, added up in places of a tensor of zeros."""
        into = argument(node, "self")
        return (
            self._histc(node) if isinstance(into, fx.Node) and operator_name(into) in ("zeros", "new_zeros") else None
        )

    _scatter_add = _index_add = _index_add_ = _scatter_add_

    def _reduced(self, node: fx.Node, *, mean: bool) -> LossReduction | None:
        """A sum or mean over the samples, or a further one after that."""
        (source, *others) = [n for n in node.all_input_nodes if tensors_of(n)]
        if not any(follows(n) for n in (source, *others)):
            return self._combined(node, [source]) if not others else None
        if any(degree(t) > 1 for t in tensors_of(source)):
            raise coupled(source)
        if mean and not proportional(spec_of(source.meta["val"]).numel):
            return None
        kind: LossReduction | None = _SAMPLES if mean else _SUM
        for at, denominator in self._batch_wide(source):
            kind = kind and self._divided(at, kind, denominator)
        return kind

    def _batch_wide(self, node: fx.Node) -> list[tuple[fx.Node, fx.Node]]:
        """Return where an element-wise quotient is divided by one number for the whole batch, and by which."""
        if operator_name(node) not in ("mul", "div", "neg", "to", "view", "reshape", "_to_copy", "mul_", "div_"):
            return []
        numbers = [n for n in node.all_input_nodes if tensors_of(n) and n in self.from_batch and not follows(n)]
        if numbers and (operator_name(node) not in ("div", "div_") or node.args[0] in numbers):
            raise self._unknown(node)
        self.passed.add(node)
        inner = [n for n in node.all_input_nodes if follows(n)]
        return [(node, number) for number in numbers] + [found for n in inner for found in self._batch_wide(n)]

    def _labelled(self, node: fx.Node) -> LossReduction | None:
        """cross_entropy and nll: the mean is over the labels that are not ignored, weighted by class."""
        target, reduction = argument(node, "target"), argument(node, "reduction")
        assert isinstance(target, fx.Node)
        if reduction != 1:
            return _SUM if reduction == 2 and follows(target) else None
        if not follows(target):
            return None
        if target.meta["val"].is_floating_point():
            return _SAMPLES
        ignore, weight = argument(node, "ignore_index"), argument(node, "weight")
        statistic = Statistic(node=target, labels=True, ignore=ignore, weight=weight)
        for source in (target, weight):
            if source is not None:
                self._refuse_parameters(node, source)
        what = ("labels", self._structure(target), ignore, weight and self._structure(weight))
        key = self._structures.setdefault(what, len(self._structures))
        return replace(
            _SUM,
            divisions=(Division(node=node, denominator=Denominator(value=None, statistics=(statistic,), key=key)),),
        )

    def _refuse_parameters(self, node: fx.Node, denominator: fx.Node) -> None:
        if denominator in self._from_parameters:
            raise CoupledError(
                f"{self._place(node)}what the loss divides by depends on the weights of the model, so it is not known before the "
                "forward. Let it depend on the batch alone."
            )

    # ---- what nodes are ---------------------------------------------------------------------------------------------

    def _structure(self, node: fx.Node) -> int:
        """The same number for nodes that compute the same from the same inputs."""
        if node not in self._numbers:
            role = self._traced.roles.get(node)
            what = role or (str(node.target), self._stand(node.args), self._stand(tuple(sorted(node.kwargs.items()))))
            self._numbers[node] = self._structures.setdefault(what, len(self._structures))
        return self._numbers[node]

    def _stand(self, value: Any) -> Any:
        if isinstance(value, fx.Node):
            return ("node", self._structure(value))
        return tuple(self._stand(v) for v in value) if isinstance(value, tuple | list) else str(value)

    def _unknown(self, node: fx.Node) -> CoupledError:
        return CoupledError(
            f"{self._place(node)}it cannot be seen how the loss is averaged: {node.target} is neither a sum nor a mean over the samples. "
            "Let the loss be a .mean(), a .sum(), a sum divided by a count of the batch, a loss of torch.nn.functional, or several of "
            "these added. Where losses of samples are wanted first, write reduction='none' and then .mean()."
        )

    def _place(self, node: fx.Node) -> str:
        line = line_of(node, full=True)
        return f"{line}\n" if line else ""


_FILLS = {"new_zeros", "new_ones", "new_full", "new_empty", "zeros_like", "ones_like", "full_like", "empty_like"}
"""Of their first operand these read no value."""


def _from_batch(traced: Traced) -> set[fx.Node]:
    """All nodes whose values depend on the samples, or whose shape does: ``ones(batch, 5)`` sums up to more in a larger batch."""
    inputs = {node for node, role in traced.roles.items() if role.kind == "input"}
    return _descendants(
        traced,
        {
            node
            for node in traced.graph.nodes
            if (node in inputs or node.op == "call_function") and any(degree(t) > 0 for t in tensors_of(node))
        },
    )


def _descendants(traced: Traced, nodes: set[fx.Node]) -> set[fx.Node]:
    """These nodes, and all whose values depend on theirs."""
    found = set(nodes)
    for node in traced.graph.nodes:
        # The size of a tensor is known without its values.
        like = node.args[0] if operator_name(node) in _FILLS else None
        sources = [source for source in node.all_input_nodes if source is not like]
        if node not in found and tensors_of(node) and any(source in found for source in sources):
            found.add(node)
            found.update(changed for changed in mutates(node))
    return found


def _common(found: list[LossReduction]) -> tuple[Division, ...]:
    return tuple(dict.fromkeys(division for reduction in found for division in reduction.divisions))


def _has_number(node: fx.Node) -> bool:
    return any(isinstance(value, int | float) and value != 0 for value in node.args[:2])

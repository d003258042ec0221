"""How the loss is averaged, told from the graph.

Parts of a batch on different devices give the gradient of the whole only if each part's loss is weighted by its share of
what the loss divides by. So the walk goes back from the loss, through everything that is linear in the sum over the samples,
until it meets the reduction, and notes the denominator: a number of samples, a count in the data, or nothing (a sum).

A loss of two terms with different denominators has no such weights, nor has one with a batch-wide statistic inside.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from heterodyne.errors import CaptureError
from heterodyne.frontend.arguments import argument, mutates, operator_name
from heterodyne.frontend.coupling import coupled, refuse_coupling
from heterodyne.frontend.export import Traced, tensors_of
from heterodyne.frontend.faults import line_of
from heterodyne.frontend.sizes import degree, proportional, size_of, spec_of
from heterodyne.graph import Loss

__all__ = ["Count", "Reduction", "read_loss"]


@dataclass(frozen=True, kw_only=True)
class Count:
    """What a mean divides by: the sum of ``node``; with ``ignore``, the number of its entries that are not that;
    with ``weight``, the sum of these class weights over them. ``least``: below it (but for 0) a guard against zero changes it."""

    node: fx.Node
    ignore: int | None = None
    weight: fx.Node | None = None
    least: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Reduction:
    """``sum`` over the samples, ``mean`` over them, ``count`` in the data, or ``constant``: it does not depend on them."""

    kind: str
    count: Count | None = None
    counts: tuple[Any, ...] = ()  # the structure of the count, to tell whether two are equal

    @property
    def loss(self) -> Loss:
        if self.kind == "sum":
            return Loss(reduction="sum")
        return Loss(reduction="mean", count="tokens" if self.kind == "count" else "samples")


_CONSTANT = Reduction(kind="constant")
_SUM = Reduction(kind="sum")
_SAMPLES = Reduction(kind="mean")

_SAME = frozenset({
    "alias", "clone", "contiguous", "expand", "flatten", "mul", "neg", "reshape", "squeeze", "to", "unsqueeze",
    "view", "_to_copy", "type_as", "detach", "lift_fresh_copy", "permute", "transpose", "t", "movedim", "select",
    "slice", "cat", "stack", "unbind", "getitem", "diagonal", "narrow", "split", "chunk", "view_as", "expand_as",
})  # fmt: skip
_NEGLIGIBLE = 1e-5  # a relative error that exactness may have
_LABELLED = frozenset({"cross_entropy_loss", "nll_loss", "nll_loss2d", "nll_loss_nd"})


def read_loss(traced: Traced) -> Reduction:
    """The averaging of the traced loss. Raises CaptureError with the line of the op that defies it."""
    walk = _Walk(traced)
    found = walk.reduction(traced.loss)
    if found.kind == "constant":
        raise CaptureError("the loss does not depend on the batch; there is nothing to train on")
    refuse_coupling(traced, walk.from_batch, walk.passed)
    return found


class _Walk:
    """The walk back from the loss. What it passed through is known to be linear in the sum over the samples."""

    def __init__(self, traced: Traced) -> None:
        self._traced = traced
        self.passed: set[fx.Node] = set()
        self.from_batch = _descendants(traced, "input", follows_batch=True)
        self._from_parameters = _descendants(traced, "parameter", follows_batch=False)
        self._structures: dict[fx.Node, Any] = {}

    def reduction(self, node: fx.Node) -> Reduction:
        """How a node whose shape does not follow the batch depends on the samples."""
        if node not in self.from_batch:
            return _CONSTANT
        self.passed.add(node)
        rule: Callable[[fx.Node], Reduction | None] | None = getattr(self, f"_{operator_name(node)}", None)
        found = rule(node) if rule is not None else self._general(node)
        if found is None:
            raise self._unknown(node)
        return found

    def _general(self, node: fx.Node) -> Reduction | None:
        name = operator_name(node)
        if name in _LABELLED:
            return self._labelled(node)
        if argument(node, "reduction") in (1, 2):
            return self._reduced(node, mean=argument(node, "reduction") == 1)
        if name in _SAME or node.target is operator.getitem:
            return self._combined(node, [n for n in node.all_input_nodes if tensors_of(n)])
        return None

    def _combined(self, node: fx.Node, operands: list[fx.Node]) -> Reduction | None:
        """Operands that are added, put beside each other, or (all but one of them constant) multiplied."""
        if any(self._follows(n) for n in operands):
            return None
        found = [self.reduction(n) for n in operands]
        varying = [r for r in found if r.kind != "constant"]
        if operator_name(node) in ("mul", "mul_") and len(varying) > 1:
            return None
        for other in varying[1:]:
            if (other.kind, other.counts) != (varying[0].kind, varying[0].counts):
                raise CaptureError(
                    f"{self._place(node)}the loss adds terms with different denominators ({_say(varying[0])} and {_say(other)}), so no "
                    "weights make the parts of a batch add up to the whole. Divide both by the same count."
                )
        return varying[0]

    def _mul(self, node: fx.Node) -> Reduction | None:
        found = self._combined(node, [n for n in node.all_input_nodes if tensors_of(n)])
        for factor in (n.meta.get("val") for n in node.all_input_nodes if not tensors_of(n)):
            if isinstance(factor, torch.SymInt):  # the number of samples, or a multiple of it
                found = _SUM if found == _SAMPLES and proportional(size_of(factor)) else None
        return found

    _mul_ = _mul

    # ---- what adds terms ------------------------------------------------------------------------------------------

    def _add(self, node: fx.Node) -> Reduction | None:
        operands = [n for n in node.all_input_nodes if tensors_of(n)]
        found = self._combined(node, operands)
        constants = [n for n in operands if n not in self.from_batch]
        if found is not None and found.kind == "sum" and (constants or _has_number(node)):
            raise CaptureError(
                f"{self._place(node)}the loss is a sum over the samples plus a term that does not depend on them; parts of a batch would "
                "each add that term. Divide the sum by the number of samples."
            )
        return found

    _sub = _add_ = _sub_ = _add

    # ---- what divides ---------------------------------------------------------------------------------------------

    def _div(self, node: fx.Node) -> Reduction | None:
        numerator, denominator = node.args[:2]
        if not isinstance(numerator, fx.Node) or self._follows(numerator):
            return None
        return self._divided(node, self.reduction(numerator), denominator)

    _div_ = _true_divide = _div

    def _divided(self, node: fx.Node, top: Reduction, denominator: Any) -> Reduction | None:
        if not isinstance(denominator, fx.Node):
            return top
        size = denominator.meta.get("val")
        if isinstance(size, torch.SymInt):
            return _SAMPLES if top.kind == "sum" and proportional(size_of(size)) else None
        if isinstance(size, int) or denominator not in self.from_batch:
            return top
        if top.kind != "sum":
            raise CaptureError(
                f"{self._place(node)}the loss is divided by something that depends on the batch after it was averaged. Divide a sum once."
            )
        count = self._count_of(denominator)
        if self._follows(count.node) or self.reduction(count.node).kind != "sum":
            return None
        return self._counted(node, count)

    def _count_of(self, node: fx.Node) -> Count:
        """The count itself, without the guard against zero around it (a part of a batch may well have none)."""
        least = 0.0
        while (guarded := _guards_below(node)) is not None:
            inner = [n for n in node.all_input_nodes if n in self.from_batch]
            if len(inner) != 1 or self._follows(inner[0]):
                break
            (node,) = inner
            least = max(least, guarded)
        return Count(node=node, least=least)

    # ---- what reduces ---------------------------------------------------------------------------------------------

    def _sum(self, node: fx.Node) -> Reduction | None:
        return self._reduced(node, mean=False)

    def _mean(self, node: fx.Node) -> Reduction | None:
        return self._reduced(node, mean=True)

    def _reduced(self, node: fx.Node, *, mean: bool) -> Reduction | None:
        """A sum or mean over the samples, or a further one after that."""
        (source, *others) = [n for n in node.all_input_nodes if tensors_of(n)]
        if not any(self._follows(n) for n in (source, *others)):
            return self._combined(node, [source]) if not others else None
        if any(degree(t) > 1 for t in tensors_of(source)):
            raise coupled(source)
        if mean and not proportional(spec_of(source.meta["val"]).numel):
            return None
        kind = _SAMPLES if mean else _SUM
        for denominator in self._batch_wide(source):
            if mean or kind is not _SUM:
                raise CaptureError(
                    f"{self._place(denominator)}inside the loss's average stands something that is computed over the whole batch. "
                    "Divide the sum by it, not the mean."
                )
            found = self._divided(node, kind, denominator)
            if found is None:
                return None
            kind = found
        return kind

    def _batch_wide(self, node: fx.Node) -> list[fx.Node]:
        """What an element-wise quotient is divided by, if it is one number for the whole batch."""
        if operator_name(node) not in ("mul", "div", "neg", "to", "view", "reshape", "_to_copy", "mul_", "div_"):
            return []
        numbers = [n for n in node.all_input_nodes if tensors_of(n) and n in self.from_batch and not self._follows(n)]
        if numbers and (operator_name(node) not in ("div", "div_") or node.args[0] in numbers):
            raise self._unknown(node)
        self.passed.add(node)
        inner = [n for n in node.all_input_nodes if self._follows(n)]
        return numbers + [found for n in inner for found in self._batch_wide(n)]

    def _labelled(self, node: fx.Node) -> Reduction | None:
        """cross_entropy and nll: the mean is over the labels that are not ignored, weighted by class."""
        target, reduction = argument(node, "target"), argument(node, "reduction")
        assert isinstance(target, fx.Node)
        if reduction != 1:
            return _SUM if reduction == 2 and self._follows(target) else None
        if not self._follows(target):
            return None
        if target.meta["val"].is_floating_point():
            return _SAMPLES
        weight = argument(node, "weight")
        count = Count(node=target, ignore=argument(node, "ignore_index"), weight=weight)
        return self._counted(node, count)

    def _counted(self, node: fx.Node, count: Count) -> Reduction:
        for source in (count.node, count.weight):
            if source is not None and source in self._from_parameters:
                raise CaptureError(
                    f"{self._place(node)}what the loss divides by depends on the weights of the model, so it is not known before the "
                    "forward. Let it depend on the batch alone."
                )
        parts = (self._structure(count.node), count.ignore, count.weight and self._structure(count.weight))
        return Reduction(kind="count", count=count, counts=parts)

    # ---- what nodes are ---------------------------------------------------------------------------------------------

    def _follows(self, node: fx.Node) -> bool:
        """Whether a node's shape grows with the batch."""
        return any(degree(t) > 0 for t in tensors_of(node))

    def _structure(self, node: fx.Node) -> Any:
        """The same for nodes that compute the same from the same inputs."""
        if node not in self._structures:
            role = self._traced.roles.get(node)
            self._structures[node] = (
                role
                if role
                else (str(node.target), self._stand(node.args), self._stand(tuple(sorted(node.kwargs.items()))))
            )
        return self._structures[node]

    def _stand(self, value: Any) -> Any:
        if isinstance(value, fx.Node):
            return self._structure(value)
        return tuple(self._stand(v) for v in value) if isinstance(value, tuple | list) else str(value)

    def _unknown(self, node: fx.Node) -> CaptureError:
        return CaptureError(
            f"{self._place(node)}it cannot be told how the loss is averaged: {node.target} is neither a sum nor a mean over the samples. "
            "Let the loss be a .mean(), a .sum(), a sum divided by a count of the batch, or a loss of torch.nn.functional."
        )

    def _place(self, node: fx.Node) -> str:
        line = line_of(node, full=True)
        return f"{line}\n" if line else ""


def _descendants(traced: Traced, kind: str, *, follows_batch: bool) -> set[fx.Node]:
    """All nodes whose value depends on a placeholder of a kind (on those that follow the batch alone)."""
    found = {
        node
        for node, role in traced.roles.items()
        if role.kind == kind and (not follows_batch or any(degree(t) > 0 for t in tensors_of(node)))
    }
    for node in traced.graph.nodes:
        # The size of a tensor is known without its values.
        if node not in found and tensors_of(node) and any(source in found for source in node.all_input_nodes):
            found.add(node)
            found.update(changed for changed in mutates(node))
    return found


def _has_number(node: fx.Node) -> bool:
    return any(isinstance(value, int | float) and value != 0 for value in node.args[:2])


def _guards_below(node: fx.Node) -> float | None:
    """Below which value a guard against division by zero changes what it guards; None for what is none."""
    name = operator_name(node)
    if name in ("to", "_to_copy"):
        return 0.0
    if name in ("maximum", "max"):
        return 1.0  # what it is compared with is a tensor: taken for the 1 that it is meant to be
    if name in ("clamp", "clamp_min"):
        least = argument(node, "min")
        return float(least) if isinstance(least, int | float) and least <= 1 and argument(node, "max") is None else None
    little = node.args[1] if name == "add" else None
    return little / _NEGLIGIBLE if isinstance(little, float) and 0 < little <= _NEGLIGIBLE else None


def _say(found: Reduction) -> str:
    return {"sum": "a sum", "mean": "a mean over the samples", "count": "a mean over counted entries"}[found.kind]

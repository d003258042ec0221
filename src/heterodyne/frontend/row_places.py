"""Integers that say the place of a sample among the rows of a batch, and between which numbers integers are."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Literal

from torch import fx

from heterodyne.frontend.arguments import argument, operator_name
from heterodyne.frontend.sizes import proportional, size_of
from heterodyne.frontend.sizes_as_values import is_size
from heterodyne.graph.op_kinds import LIKE, SAME_VALUES, SLICES

__all__ = ["MOVES", "AffineIndex", "Dependence", "bounds", "counted", "is_order", "is_own", "times"]


@dataclass(frozen=True, kw_only=True, slots=True)
class AffineIndex:
    """Integers ``scale * i + rest`` for sample i, with ``low <= rest <= high`` (None: not known)."""

    scale: int
    low: int | None
    high: int | None

    def shifted(self, low: int | None, high: int | None) -> AffineIndex:
        return AffineIndex(
            scale=self.scale,
            low=None if self.low is None or low is None else self.low + low,
            high=None if self.high is None or high is None else self.high + high,
        )

    @property
    def own(self) -> bool:
        """Return whether it is one of the ``scale`` rows of the sample."""
        return self.low is not None and self.high is not None and self.low >= 0 and self.high < self.scale


@dataclass(frozen=True, kw_only=True, slots=True)
class Dependence:
    """What a value depends on, and the op that made it so."""

    on: Literal["size", "place"]
    cause: fx.Node


MOVES = SAME_VALUES | LIKE | SLICES | {"index", "repeat", "repeat_interleave"}


def is_order(node: fx.Node) -> bool:
    """Return whether a tensor holds what ``sort`` or ``argsort`` made of the order of rows."""
    while operator_name(node) in MOVES:
        node = argument(node, "self")
    made = node.args[0] if node.target is operator.getitem and node.args[1] == 1 else node
    return isinstance(made, fx.Node) and operator_name(made) in ("argsort", "sort")


def is_own(source: fx.Node, dim: int, place: AffineIndex) -> bool:
    size = size_of(source.meta["val"].shape[dim])
    return proportional(size) and size.coefficients[1] == place.scale and place.own


def counted(node: fx.Node) -> AffineIndex | Dependence | None:
    """``torch.arange``: the places of the samples, or of their rows; anything else that has another length for another batch."""
    start, step = argument(node, "start") or 0, argument(node, "step") or 1
    if not any(is_size(n) for n in node.all_input_nodes):
        return None
    size = size_of(node.meta["val"].shape[0])
    if not isinstance(start, int) or not isinstance(step, int) or not proportional(size):
        return Dependence(on="place", cause=node)
    rows = int(size.coefficients[1])
    return AffineIndex(scale=step * rows, low=start, high=start + step * (rows - 1))


def times(value: int | None, factor: int) -> int | None:
    return None if value is None else value * factor


def bounds(node: fx.Node) -> tuple[int | None, int | None]:
    """Between which numbers integers of a tensor are, where the op that made them says so."""
    name = operator_name(node)
    source = argument(node, "self")
    if node.target is operator.getitem and isinstance(node.args[0], fx.Node):
        if operator_name(node.args[0]) in MOVES:
            return bounds(node.args[0])
        if operator_name(node.args[0]) not in ("max", "min", "sort", "topk") or node.args[1] != 1:
            return None, None
        name, source, node = "argmax", argument(node.args[0], "self"), node.args[0]
    if name in ("argmax", "argmin", "argsort"):
        dim = argument(node, "dim")
        length = source.meta["val"].shape[-1 if dim is None and name == "argsort" else dim] if dim is not None else None
        return (0, length - 1) if isinstance(length, int) else (None, None)
    if name == "arange":
        start, end, step = argument(node, "start") or 0, argument(node, "end"), argument(node, "step") or 1
        if all(isinstance(value, int) for value in (start, end, step)) and step > 0:
            return start, end - 1
        return None, None
    if name == "remainder":
        divisor = argument(node, "other")
        return (0, divisor - 1) if isinstance(divisor, int) and divisor > 0 else (None, None)
    if name == "randint":
        low, high = argument(node, "low") or 0, argument(node, "high")
        return (low, high - 1) if isinstance(low, int) and isinstance(high, int) else (None, None)
    if name == "clamp":
        low, high = argument(node, "min"), argument(node, "max")
        return low if isinstance(low, int) else None, high if isinstance(high, int) else None
    if name in MOVES and isinstance(source, fx.Node):
        return bounds(source)
    return None, None

"""How a TaskGraph is laid out on the devices of its stage: a mesh of axes, with a share for each member of each axis.

The devices of a stage fill its mesh in row-major order: of a 2 x 3 mesh the first three devices are the first member of the outer axis.
Axes along which everything is replicated (data parallelism) come first. Their members are *rows*: each takes samples of its own, and
holds all weights of the stage, in parts on its devices where further axes say so.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, Literal, TypeAlias, TypeVar

from pydantic import BaseModel, ConfigDict, SerializerFunctionWrapHandler, model_serializer

from heterodyne.documents import Whole
from heterodyne.plan.slices import slices

__all__ = ["Axis", "Kind", "Layout", "PlanPart", "count_of", "lines", "nested_slices"]

_T = TypeVar("_T")
Kind: TypeAlias = Literal["replicate", "split", "context"]


class PlanPart(BaseModel):
    """Anything that a plan consists of."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, arbitrary_types_allowed=True, allow_inf_nan=False
    )


class Axis(PlanPart):
    """One axis of a mesh.

    ``shares`` has one whole number a member: samples of each micro-batch (replicate), units of what is cut (split), or positions of the
    sequence (context). Only their ratios count.
    """

    kind: Kind = "replicate"
    shares: tuple[Whole, ...]


class Layout(Axis):
    """How a TaskGraph is laid out on the devices of its stage: along one axis, or along the outermost one and those ``inner`` to it, in
    order.

    The product of the numbers of members is the number of devices.
    """

    inner: tuple[Axis, ...] = ()

    @model_serializer(mode="wrap")
    def _without_empty_inner(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        fields: dict[str, Any] = handler(self)
        return fields if self.inner else {name: value for name, value in fields.items() if name != "inner"}

    @property
    def axes(self) -> tuple[Axis, ...]:
        """All of them, outermost first, which is this layout itself."""
        return (self, *self.inner)

    @property
    def sizes(self) -> tuple[int, ...]:
        """The number of members of each axis."""
        return (len(self.shares), *(len(axis.shares) for axis in self.inner))

    @property
    def of_devices(self) -> tuple[int, ...]:
        """The share of each device: the product of those that it has along the axes."""
        found = [1]
        for axis in self.axes:
            found = [whole * share for whole in found for share in axis.shares]
        return tuple(found)

    def within(self, outer: int) -> Layout:
        """That inside one member of the ``outer`` outermost axes, without axes of one member."""
        kept = tuple(axis for axis in self.axes[outer:] if len(axis.shares) > 1) or (Axis(shares=(1,)),)
        return Layout(kind=kept[0].kind, shares=kept[0].shares, inner=kept[1:])

    def __str__(self) -> str:
        """As in ``replicate [2, 1] x split [3, 1]``."""
        return " x ".join(f"{axis.kind} {list(axis.shares)}" for axis in self.axes)


def nested_slices(size: int, axes: Sequence[Axis]) -> tuple[tuple[int, int], ...]:
    """``(first sample, count)`` for each place of a mesh: the members of each axis share what their place along the outer ones has."""
    found = [(0, size)]
    for axis in axes:
        found = [(first + start, own) for first, count in found for start, own in slices(count, axis.shares)]
    return tuple(found)


def lines(members: Sequence[_T], sizes: Sequence[int]) -> list[list[tuple[_T, ...]]]:
    """For each axis of a mesh, which ``members`` fill, the groups of those that have the same places along all others."""
    found = []
    for axis in range(len(sizes)):
        stride = prod(sizes[axis + 1 :])
        starts = (at for at in range(len(members)) if at // stride % sizes[axis] == 0)
        found.append([tuple(members[at : at + stride * sizes[axis] : stride]) for at in starts])
    return found


def count_of(axes: Sequence[Axis]) -> int:
    """Devices in a mesh."""
    return prod(len(axis.shares) for axis in axes)

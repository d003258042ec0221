"""The share of each op on each member of a sharded stage: of its FLOPs, its memory traffic, and the activations that it saves.

How an op runs says which of its tensors are sharded, and the slices may be unequal (`heterodyne.graph.sharding`). FLOPs divide as the
sharded dim does. Memory traffic does not always: a column-parallel linear layer reads all of its input.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import product
from math import prod
from typing import Final, TypeAlias

from heterodyne.graph.ir import Op, Ref
from heterodyne.graph.sharding import Layout, Sharding

__all__ = ["Fractions", "Layouts", "OpShares", "StageShares"]

Fractions: TypeAlias = tuple[float, ...]
"""One value a member, in the order of the devices of the stage."""

Layouts: TypeAlias = tuple[Layout, ...]
"""How a tensor lies along each axis."""

Tensors: TypeAlias = Sequence[tuple[Ref, Layouts]]
_PAIR: Final = 2  # letters that are cut at once (`Rule.together`)


@dataclass(frozen=True, kw_only=True, slots=True)
class OpShares:
    """Of one op, per member, as fractions of what one device would do.

    Args:
        operations: FLOPs.
        read, written: memory traffic.
        kept: activations saved for its backward; by what it reads, since an op saves its inputs or something of their shape.
    """

    operations: Fractions
    read: Fractions
    written: Fractions
    kept: Fractions


@dataclass(frozen=True, kw_only=True, eq=False)
class StageShares:
    """The shares of all ops of a stage. ``samples``: of the micro-batch, which all members work on. ``nodes``: that of each member, where
    the all-to-alls of experts are hierarchical.
    """

    sharding: Sharding
    samples: int
    nodes: tuple[str, ...] = ()
    _known: dict[str, OpShares] = field(default_factory=dict, repr=False)
    _cuts: dict[tuple[Ref, Layout], Fractions] = field(default_factory=dict, repr=False)

    @cached_property
    def along(self) -> tuple[StageShares, ...]:
        """The shares along each mesh axis by itself, outermost first."""
        if self.sharding.inner is None:
            return (self,)
        return tuple(
            StageShares(sharding=replace(axis, inner=None), samples=self.samples) for axis in self.sharding.axes
        )

    @property
    def members(self) -> int:
        return prod(axis.members for axis in self.sharding.axes)

    def lies(self, ref: Ref) -> Layouts:
        """The layout of a tensor when it is made, received or saved."""
        return tuple(axis.layouts[ref] for axis in self.sharding.axes)

    def read_by(self, op: Op) -> Tensors:
        """The inputs of an op, in the layouts that it needs."""
        layouts = zip(*(axis.strategies[op.name].operands for axis in self.sharding.axes), strict=True)
        return list(zip(op.operands, layouts, strict=True))

    def made_by(self, op: Op) -> Tensors:
        """The outputs of an op, in the layouts in which it makes them."""
        layouts = zip(*(axis.strategies[op.name].outputs for axis in self.sharding.axes), strict=True)
        return [(Ref(op.name, place), layout) for place, layout in enumerate(layouts)]

    def of_tensor(self, ref: Ref, *layouts: Layout) -> Fractions:
        """The fraction of a tensor on each member; 1 unless it is sharded. ``layouts``: along each axis."""
        if len(layouts) > 1:
            return _product([own.of_tensor(ref, layout) for own, layout in zip(self.along, layouts, strict=True)])
        (layout,) = layouts
        if layout.kind != "shard":
            return (1.0,) * self.members
        if (ref, layout) not in self._cuts:
            sizes = self.sharding.sizes(ref, layout, self.samples)
            total = sum(sizes)
            self._cuts[ref, layout] = tuple(size / total if total else 0.0 for size in sizes)
        return self._cuts[ref, layout]

    def bytes_of(self, ref: Ref) -> float:
        """Of the whole tensor."""
        return self.sharding.graph.spec(ref).bytes(self.samples)

    def of_op(self, op: Op) -> OpShares:
        if op.name not in self._known:
            self._known[op.name] = self._of_op(op)
        return self._known[op.name]

    def _of_op(self, op: Op) -> OpShares:
        if op.name not in self.sharding.strategies:  # it is cheap, and the stage does not read what it makes
            whole = (1.0,) * self.members
            return OpShares(operations=whole, read=whole, written=whole, kept=whole)
        read, made = self.read_by(op), self.made_by(op)
        operations = _product([own.divided(op) for own in self.along])
        # What is there anyway no op keeps.
        flowing = [(ref, layouts) for ref, layouts in read if ref.name not in self.sharding.graph.given]
        sent = any(len(axis.strategies[op.name].name) == _PAIR for axis in self.sharding.axes)
        kept = self._mean(flowing) or self._mean(made) or operations
        return OpShares(
            operations=operations,
            read=self._mean(read) or operations,
            written=self._mean(made) or operations,
            # Where rows are sent to what they have chosen, they are kept there.
            kept=tuple(map(max, kept, operations)) if sent else kept,
        )

    def divided(self, op: Op) -> Fractions:
        """The FLOPs of an op along the only axis: as the sharded dim; of a pair of letters the second, to which all-to-all sends what was
        sharded along the first.
        """
        strategy = self.sharding.strategies[op.name]
        tensors = [(ref, layout) for ref, (layout,) in (*self.read_by(op), *self.made_by(op)) if layout.kind == "shard"]
        if not strategy.divides or not tensors:
            return (1.0,) * self.members
        read = [tensor for tensor in tensors if tensor[0].name != op.name]
        parts = self.of_tensor(*(read or tensors)[-1])
        if op.kind == "scaled_dot_product_attention" and strategy.name == "l" and op.argument("is_causal") is True:
            return _of_causal(parts)
        return parts

    def _mean(self, tensors: Tensors) -> Fractions:
        """The part of all these tensors together; () for none, or for some without a byte."""
        weighed = [(self.bytes_of(ref), self.of_tensor(ref, *layouts)) for ref, layouts in tensors]
        total = sum(size for size, _ in weighed)
        if total <= 0:
            return ()
        return tuple(sum(size * own[member] for size, own in weighed) / total for member in range(self.members))


def _product(of_axes: Sequence[Fractions]) -> Fractions:
    """Of the members of a mesh, in row-major order."""
    return tuple(prod(each) for each in product(*of_axes))


def _of_causal(parts: Fractions) -> Fractions:
    """Slices of the queries under a causal mask: each with all keys up to its own last one, of which a whole kernel skips half."""
    reached, found = 0.0, []
    for part in parts:
        reached += part
        found.append(min(1.0, 2 * part * reached))
    return tuple(found)

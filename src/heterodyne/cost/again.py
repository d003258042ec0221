"""A part of a stage that is computed again before its backward, but for ops that keep what they make.

How the seconds of a block divide over its ops is told by a roofline of the device, since only blocks are measured: by operations
alone, activation functions and norms would take no time. An op of the user's own may take any part of them: where one is run again, all
seconds of the block are counted. On one device the second run ends where nothing more is needed, so a product
that comes last is not done again: its backward needs what enters it alone.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from heterodyne.graph.ir import ModelGraph, Op
from heterodyne.graph.size import Size
from heterodyne.plan.kept import kept_ops

__all__ = ["Again", "op_weight", "parts_again"]

Ops = tuple[int, int]
_NEEDS_INPUTS_ALONE = frozenset({"linear", "addmm", "mm", "matmul", "bmm", "baddbmm", "conv1d", "conv2d", "conv3d"})
_WEIGHED = frozenset({"aten", "heterodyne", "prims"})


@dataclass(frozen=True, kw_only=True)
class Again:
    """``ops``: ``[start, stop)``; ``kept``: names of those that keep what they make."""

    ops: Ops
    kept: frozenset[str] = frozenset()

    def redone(self, graph: ModelGraph, size: int, operations_a_byte: float, *, to_end: bool = False) -> float:
        """The part of its forward seconds that it takes once more; ``to_end``: the second run is not stopped early."""
        ops = graph.ops[self.ops[0] : self.ops[1]]
        weights = [op_weight(op, size, operations_a_byte) for op in ops]
        whole, needed = sum(weights), len(ops) if to_end else _needed(ops)
        if whole <= 0:
            return 1.0
        done = [(op, weight) for op, weight in zip(ops[:needed], weights, strict=False) if op.name not in self.kept]
        return 1.0 if any(_of_any_weight(op) for op, _ in done) else sum(weight for _, weight in done) / whole

    def kept_bytes(
        self, graph: ModelGraph, size: int, saved: float, part: Callable[[Op], float] | None = None
    ) -> float:
        """Bytes of what its ops keep.

        Args:
            saved: what the part would keep in all: as far as that is more or less than the graph says (16 bits), so are these.
            part: what of the output of an op is here; None: all.
        """
        if not self.kept:
            return 0.0
        ops = graph.ops[self.ops[0] : self.ops[1]]
        made = sum(
            (1.0 if part is None else part(op)) * sum(spec.bytes(size) for spec in op.outputs)
            for op in ops
            if op.name in self.kept
        )
        by_graph = Size.total(op.bytes_saved for op in ops)(size)
        return made * (saved / by_graph if by_graph > 0 and part is None else 1.0)


def parts_again(graph: ModelGraph, ops: Ops, blocks: Collection[int], keep: Sequence[str]) -> list[Again]:
    """The parts of a stage that lie in those blocks; ``keep``: as a plan has it."""
    parts = []
    for block in map(graph.blocks.__getitem__, sorted(blocks)):
        start, stop = max(ops[0], block.start), min(ops[1], block.stop)
        if start < stop:
            parts.append(Again(ops=(start, stop), kept=frozenset(op.name for op in kept_ops(graph, block, keep))))
    return parts


def op_weight(op: Op, size: int, operations_a_byte: float) -> float:
    """What the forward of an op takes, in operations: its own, or those that could be done while memory is moved, whichever is more."""
    return max(op.flops_forward(size), operations_a_byte * (op.bytes_read(size) + op.bytes_written(size)))


def _of_any_weight(op: Op) -> bool:
    """Whether nothing tells how long it takes: an operator that is neither PyTorch's nor of this library."""
    library, name, _ = op.target.partition(".")
    return bool(name) and library not in _WEIGHED


def _needed(ops: Sequence[Op]) -> int:
    """How many ops run before everything is there that the backward needs."""
    last = max((place for place, op in enumerate(ops) if op.bytes_saved(1) > 0), default=-1)
    return last if last >= 0 and ops[last].kind in _NEEDS_INPUTS_ALONE else last + 1

"""Activation recomputation of a part of a stage, selectively: some ops keep their outputs.

Only blocks are measured, so a block's seconds are divided over its ops by a roofline of the device: by FLOPs alone, activation functions
and norms would take no time. An op of the user's own may take any part, so where one is recomputed, all seconds of its block are
counted. On one device the recomputation stops early, when nothing more is needed, so a matrix product that comes last is not recomputed:
its backward needs its inputs alone.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from heterodyne.graph.ir import ModelGraph, Op
from heterodyne.graph.size import Size
from heterodyne.plan.kept import kept_ops

__all__ = ["RecomputedPart", "op_weight", "parts_again"]

Ops = tuple[int, int]
_NEEDS_INPUTS_ALONE = frozenset({"linear", "addmm", "mm", "matmul", "bmm", "baddbmm", "conv1d", "conv2d", "conv3d"})
_WEIGHED = frozenset({"aten", "heterodyne", "prims"})


@dataclass(frozen=True, kw_only=True)
class RecomputedPart:
    """``ops``: ``[start, stop)``; ``kept``: names of the ops in it that keep their outputs."""

    ops: Ops
    kept: frozenset[str] = frozenset()

    def redone(self, graph: ModelGraph, size: int, operations_a_byte: float, *, to_end: bool = False) -> float:
        """The fraction of its forward seconds that is recomputed; ``to_end``: without early stop."""
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
        """Bytes of the outputs that its ops keep.

        Args:
            saved: the measured bytes that the part would save without recomputation; as far as they differ from what the graph says (16
                bits), so does the result.
            part: the fraction of each op's output on this device; None: all.
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


def parts_again(graph: ModelGraph, ops: Ops, blocks: Collection[int], keep: Sequence[str]) -> list[RecomputedPart]:
    """The parts of a stage that lie in recomputed blocks; ``keep``: as in a plan."""
    parts = []
    for block in map(graph.blocks.__getitem__, sorted(blocks)):
        start, stop = max(ops[0], block.start), min(ops[1], block.stop)
        if start < stop:
            parts.append(
                RecomputedPart(ops=(start, stop), kept=frozenset(op.name for op in kept_ops(graph, block, keep)))
            )
    return parts


def op_weight(op: Op, size: int, operations_a_byte: float) -> float:
    """The forward cost of an op in FLOPs: its own, or those that could be done while its memory traffic lasts, whichever is more."""
    return max(op.flops_forward(size), operations_a_byte * (op.bytes_read(size) + op.bytes_written(size)))


def _of_any_weight(op: Op) -> bool:
    """Whether nothing tells its cost: an operator that is neither PyTorch's nor of this library."""
    library, name, _ = op.target.partition(".")
    return bool(name) and library not in _WEIGHED


def _needed(ops: Sequence[Op]) -> int:
    """How many ops run before everything is there that the backward needs."""
    last = max((place for place, op in enumerate(ops) if op.bytes_saved(1) > 0), default=-1)
    return last if last >= 0 and ops[last].kind in _NEEDS_INPUTS_ALONE else last + 1

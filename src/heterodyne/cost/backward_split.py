"""Split of a backward: I, the gradients of inputs, and W, those of weights.

A matrix product y = x w has two products of the same size in its backward, dx = dy w' and dw = x' dy, so an op that reads trainable
weights spends half of its backward on W (Qi et al., "Zero Bubble Pipeline Parallelism", ICLR 2024), or all of it where no input needs a
gradient. Everything else belongs to I.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from heterodyne.graph.ir import ModelGraph, Op
from heterodyne.graph.size import ZERO, Size

__all__ = ["BackwardSplit"]

_LINEAR = frozenset({"aten.linear.default", "aten.addmm.default"})


@dataclass(frozen=True, eq=False)
class BackwardSplit:
    """The split of the backward of every op of a graph."""

    graph: ModelGraph

    @cached_property
    def weight_flops(self) -> tuple[Size, ...]:
        """FLOPs of W, per op."""
        flows = self._flows
        return tuple(
            ZERO
            if not learns
            else op.flops_backward * (0.5 if any(flows.get(name, False) for name in op.inputs) else 1.0)
            for op, learns in zip(self.graph.ops, self.learns, strict=True)
        )

    @cached_property
    def input_flops(self) -> tuple[Size, ...]:
        """FLOPs of I, per op."""
        return tuple(op.flops_backward + own * -1.0 for op, own in zip(self.graph.ops, self.weight_flops, strict=True))

    def weight_bytes(self, start: int, stop: int) -> Size:
        """Bytes that W of the ops ``[start, stop)`` needs: inputs of linear layers, and gradients of their outputs. Gradients of other
        weights are computed in I.
        """
        made = {op.name: op for op in self.graph.ops}
        given = {entry.symbol: entry.spec.bytes for entry in self.graph.inputs}
        entering: dict[str, Size] = {}
        leaving = []
        for op in self.graph.ops[start:stop]:
            if self.waits(op):
                for name in op.inputs:
                    entering[name] = (
                        Size.total(s.bytes for s in made[name].outputs) if name in made else given.get(name, ZERO)
                    )
                leaving += [spec.bytes for spec in op.outputs]
        return Size.total([*entering.values(), *leaving])

    def waits(self, op: Op) -> bool:
        """Whether its weight gradients are deferred to W: those of linear layers are."""
        return op.target in _LINEAR and op.name in self._learning

    @cached_property
    def _learning(self) -> frozenset[str]:
        return frozenset(op.name for op, learns in zip(self.graph.ops, self.learns, strict=True) if learns)

    @cached_property
    def _flows(self) -> dict[str, bool]:
        return {op.name: any(op.differentiable) for op in self.graph.ops}

    @cached_property
    def learns(self) -> tuple[bool, ...]:
        """Whether an op has trainable weights and receives a gradient."""
        trainable = {p.name for p in self.graph.parameters if p.trainable}
        return tuple(any(op.differentiable) and not trainable.isdisjoint(op.parameters) for op in self.graph.ops)

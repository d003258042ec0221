"""Gradients that are allocated while activations are freed: the peak of both in a backward, above what was there at its start.

A gradient on a single device is allocated in the first backward, and so is the own shard of one under ZeRO-2 or ZeRO-3; under ZeRO-1 a
backend may sum in separate memory behind the last backward. A backward runs the blocks of a stage from the last to the first; each frees
its activations and leaves gradients.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from heterodyne.graph.ir import ModelGraph

__all__ = ["GradientBuildUp", "at_most", "by_block"]

Ops = tuple[int, int]


@dataclass(frozen=True, kw_only=True)
class GradientBuildUp:
    """Bytes of gradients of one stage, by parameter, each at the first op of the backward that makes it.

    ``first``: allocated by the first backward; ``last``: in addition by the last one.
    """

    first: Mapping[str, float] = field(default_factory=dict)
    last: Mapping[str, float] = field(default_factory=dict)


def by_block(graph: ModelGraph, ops: Ops, gradients: Mapping[str, float]) -> list[tuple[Ops, float]]:
    """The blocks of a stage in the order of the backward, as op ranges, each with the bytes of the gradients that it is the first to
    allocate.
    """
    left, found = dict(gradients), []
    for block in reversed(graph.blocks):
        start, stop = max(ops[0], block.start), min(ops[1], block.stop)
        if start < stop:
            names = {name for op in graph.ops[start:stop] for name in op.parameters}
            found.append(((start, stop), sum(left.pop(name, 0.0) for name in names)))
    return found


def at_most(kept: Sequence[float], made: Sequence[float], again: Sequence[float]) -> float:
    """Peak bytes above the start, over blocks in order: ``kept`` is freed, ``made`` is allocated, ``again`` exists only meanwhile."""
    most = now = 0.0
    for goes, comes, meanwhile in zip(kept, made, again, strict=True):
        most = max(most, now + meanwhile)
        now += comes - goes
        most = max(most, now)
    return most

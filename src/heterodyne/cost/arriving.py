"""Gradients that come while activations go: what a backward holds at most of both, on top of what it found.

A gradient that a device has to itself is not there before the first backward that makes it, nor is the own part of one that is shared
out (ZeRO-2 and ZeRO-3), nor, behind a last backward, are sums that a backend makes apart from the gradients (ZeRO-1). Backwards run the
blocks of a stage from the last to the first; each lets go of what it has kept, and leaves gradients.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from heterodyne.graph.ir import ModelGraph

__all__ = ["Arriving", "at_most", "by_block"]

Ops = tuple[int, int]


@dataclass(frozen=True, kw_only=True)
class Arriving:
    """Bytes of the gradients of one stage, by parameter, each where the stage meets it first on its way back.

    ``first``: that its first backward leaves; ``last``: that its last one leaves besides.
    """

    first: Mapping[str, float] = field(default_factory=dict)
    last: Mapping[str, float] = field(default_factory=dict)


def by_block(graph: ModelGraph, ops: Ops, gradients: Mapping[str, float]) -> list[tuple[Ops, float]]:
    """The parts of a stage that its blocks are, from the last to the first, each with the bytes of the gradients that it is the first to
    make."""
    left, found = dict(gradients), []
    for block in reversed(graph.blocks):
        start, stop = max(ops[0], block.start), min(ops[1], block.stop)
        if start < stop:
            names = {name for op in graph.ops[start:stop] for name in op.parameters}
            found.append(((start, stop), sum(left.pop(name, 0.0) for name in names)))
    return found


def at_most(kept: Sequence[float], made: Sequence[float], again: Sequence[float]) -> float:
    """The most bytes on top of what there was before, block after block: ``kept`` goes, ``made`` comes, ``again`` is there meanwhile."""
    most = now = 0.0
    for goes, comes, meanwhile in zip(kept, made, again, strict=True):
        most = max(most, now + meanwhile)
        now += comes - goes
        most = max(most, now)
    return most

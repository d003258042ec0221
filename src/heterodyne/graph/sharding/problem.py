"""What is asked: the ops of a stage, how their regions are laid out on its devices, and how the tensors at its borders."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from heterodyne.graph.ir import ModelGraph, Op, Ref
from heterodyne.graph.sharding.layout import Layout
from heterodyne.graph.sharding.price import Price

__all__ = ["Mode", "Problem"]


@dataclass(frozen=True, slots=True)
class Mode:
    """What the plan says of an op: how its region is laid out on the devices, and which list of shares it goes by."""

    kind: Literal["replicate", "split", "context"] = "replicate"
    by: int = 0


@dataclass(frozen=True, kw_only=True)
class Problem:
    """What is given and what is wanted.

    Args:
        graph: the model.
        ops: of the stage, in order, with those that it makes again for itself.
        modes: of each op.
        given: how what it receives is laid out; the model's inputs are whole.
        wanted: how what it sends, or the loss, shall be laid out.
        samples: of a micro-batch.
        forbidden: ``(op, letter)`` that may not be cut.
        gaps: lists of shares in which a device has none.
    """

    graph: ModelGraph
    ops: tuple[Op, ...]
    modes: Mapping[str, Mode]
    given: Mapping[Ref, Layout]
    wanted: Mapping[Ref, Layout]
    samples: int
    price: Price
    forbidden: frozenset[tuple[str, str]] = frozenset()
    gaps: frozenset[int] = frozenset()

"""Outputs of modules, put together from what ranks have seen of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from heterodyne.api.loop.prediction import gathered_rows
from heterodyne.errors import PlanError
from heterodyne.graph.ir import ModelGraph
from heterodyne.graph.op import Op
from heterodyne.module_outputs import Seen, nested
from heterodyne.runtime.comm.communicator import Communicator

__all__ = ["OutputShard", "Point", "outputs_of", "shards_of", "whole_output"]


@dataclass(frozen=True, kw_only=True)
class OutputShard:
    """What a module has returned on this rank for the samples ``[first, first + count)`` of a batch, on the rank's device.

    ``output``: a tensor, or tuples and dicts of them.
    """

    first: int
    count: int
    output: Any


@dataclass(frozen=True, kw_only=True)
class Point:
    """One tensor of the output of a module in one of its calls. ``index``: of its op in the graph."""

    path: str
    op: Op
    index: int

    @property
    def call(self) -> int:
        return _number(self.op, "call")

    @property
    def leaf(self) -> int:
        return _number(self.op, "leaf")

    @property
    def form(self) -> str:
        return str(self.op.argument("form"))

    @property
    def dim(self) -> int | None:
        """Return the dim in which the samples are, in order; None if there is none."""
        return self.op.samples[0] if self.op.samples else None


def _number(op: Op, name: str) -> int:
    value = op.argument(name)
    assert isinstance(value, int)
    return value


def whole_output(
    graph: ModelGraph,
    point: Point,
    seen: Sequence[Seen],
    on: Literal["all", "rank0"],
    communicator: Communicator,
) -> Tensor | None:
    """Return one tensor of the output of a module as one device has it, on the host of the ranks ``on`` which it shall be. Collective.

    ``seen``: what this rank has of that module. Raises PlanError where parts of it do not make up the whole.
    """
    entries = [e for e in seen if (e.leaf, e.call) == (point.leaf, point.call)]
    own = {(e.samples.start, len(e.samples)): e.value for e in entries}
    of_all = communicator.all_gather_object(tuple(own))
    spans = _held_once(of_all)
    mine = [own[span] for span in spans[communicator.rank]]
    if point.dim is None:
        different = {span for each in of_all for span in each}
        if len(different) > 1 and _follows_batch(graph, point.op):
            raise PlanError(
                f"the output of {point.path!r} has no rows of its own for each sample, and the batch ran in {len(different)} parts: "
                "none of them is what one device has. Ask for a module whose output has the samples in one dim, give fewer samples, or "
                "take what each rank has of it (gather=False)"
            )
        first = next(rank for rank, own_spans in enumerate(spans) if own_spans)
        spans = [((0, 1),) if rank == first else () for rank in range(len(spans))]
        rows = [value[None] for value in mine[:1]]
    else:
        rows = [
            _by_sample(value, point.dim, count)
            for value, (_, count) in zip(mine, spans[communicator.rank], strict=True)
        ]
    part = torch.cat(rows).cpu().contiguous() if rows else None
    described = communicator.all_gather_object(None if part is None else (tuple(part.shape[1:]), part.dtype))
    shape, dtype = next(entry for entry in described if entry is not None)
    whole = gathered_rows(part, spans, (0, shape, dtype), communicator, on)
    if whole is None:
        return None
    return whole[0] if point.dim is None else whole.movedim(0, point.dim).flatten(point.dim, point.dim + 1)


def outputs_of(points: Sequence[Point], values: Sequence[Any]) -> Any:
    """Return the output of a module; of one that is called several times a list of them."""
    calls: dict[int, list[tuple[Point, Any]]] = {}
    for point, value in zip(points, values, strict=True):
        calls.setdefault(point.call, []).append((point, value))
    made = []
    for found in calls.values():
        by_leaf = {point.leaf: value for point, value in found}
        made.append(nested(found[0][0].form, [by_leaf.get(leaf) for leaf in range(max(by_leaf) + 1)]))
    return made if len(made) > 1 else made[0]


def shards_of(points: Sequence[Point], seen: Sequence[Seen]) -> list[OutputShard]:
    """Return what this rank has of the outputs of a module, in the order of its samples."""
    found = []
    for span in sorted({(entry.samples.start, len(entry.samples)) for entry in seen}):
        here = {(e.call, e.leaf): e.value for e in seen if (e.samples.start, len(e.samples)) == span}
        own = [point for point in points if (point.call, point.leaf) in here]
        output = outputs_of(own, [here[point.call, point.leaf] for point in own])
        found.append(OutputShard(first=span[0], count=span[1], output=output))
    return found


def _held_once(of_all: Sequence[Sequence[tuple[int, int]]]) -> list[tuple[tuple[int, int], ...]]:
    """Return for each rank those of its spans that no earlier rank has: devices of a row have the same samples."""
    known: set[tuple[int, int]] = set()
    kept = []
    for spans in of_all:
        kept.append(tuple(sorted(set(spans) - known)))
        known.update(spans)
    return kept


def _by_sample(value: Tensor, dim: int, samples: int) -> Tensor:
    """[..., samples * rows, ...] as [samples, ..., rows, ...]."""
    shape = (*value.shape[:dim], samples, value.shape[dim] // samples, *value.shape[dim + 1 :])
    return value.reshape(shape).movedim(dim, 0)


def _follows_batch(graph: ModelGraph, op: Op) -> bool:
    """Return whether a value depends on the samples."""
    batch = {entry.symbol for entry in graph.inputs if entry.batch_dim is not None}
    waiting, known = list(op.inputs), set(op.inputs)
    while waiting:
        name = waiting.pop()
        if name in batch:
            return True
        made = graph.op_by_name.get(name)
        for source in () if made is None else made.inputs:
            if source not in known:
                known.add(source)
                waiting.append(source)
    return False

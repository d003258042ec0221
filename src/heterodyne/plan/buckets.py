"""Which gradients are reduced together, between whom, and in what order.

Parameters are taken in the reverse of the order in which the forward first uses them, which is about the order in which the
backward completes their gradients, and are gathered in buckets of at least ``bucket_bytes`` each (Li et al., "PyTorch
Distributed", VLDB 2020, section 3.2), one bucket for each set of devices that own the same parameters. A device owns what the
ops of its stages read, so a parameter that is tied across stages has owners in all of them; where a stage is sharded over its devices,
each owns its part, and where pipelines cut a parameter in different ways, what the same devices own is reduced together. Every rank,
and the simulator, must cut buckets alike, so this is a pure function.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeAlias

from heterodyne.errors import PlanError
from heterodyne.graph.cut import computed_again
from heterodyne.graph.ir import ModelGraph, Parameter, dtype_bytes
from heterodyne.graph.sharding import Sharding
from heterodyne.graph.size import ZERO
from heterodyne.plan.boxes import Box, Slice, numel, refined
from heterodyne.plan.plan import Pipeline, Plan, Stage
from heterodyne.plan.sharded_stage import shard_stage

__all__ = [
    "Bucket",
    "BucketPart",
    "Holdings",
    "gradient_buckets",
    "holdings_of",
    "room_bytes",
    "stages_reading",
]


BUCKETS_UNDER_WAY = 2
"""Buckets that are reduced or gathered at a time, where gradients are sharded and buffers come and go; one more is being filled."""

_MOST_HALF_BYTES = 2**21


def room_bytes(largest: int, places: int) -> int:
    """Return the bytes of the memory, in two halves, that a CPU worker lends its neighbours on one machine to exchange ranges of up to
    ``largest`` bytes in.

    Longer ones go in more pieces; each of the ``places`` has 64 bytes in a half at least.
    """
    return 2 * -(-max(min(largest, _MOST_HALF_BYTES), 64 * places) // 64) * 64


@dataclass(frozen=True, kw_only=True, slots=True)
class BucketPart:
    """A parameter, or the box of it that the same devices hold. ``box``: see `heterodyne.plan.boxes`."""

    name: str
    box: Box = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Bucket:
    """``owners``: the devices whose gradients are summed, in the order of the plan. ``blocks``: those that read any of the parameters."""

    index: int
    parts: tuple[BucketPart, ...]
    bytes: int
    blocks: tuple[int, ...]
    owners: tuple[str, ...] = ()

    @property
    def parameters(self) -> tuple[str, ...]:
        """The names of the parameters of which it has parts."""
        return tuple(dict.fromkeys(part.name for part in self.parts))

    def ready_block(self, first: int = 0) -> int:
        """The block whose backward completes the last of these gradients on a stage that begins with block ``first``.

        The backward runs the blocks from last to first, so it is the lowest that reads any of the parameters.
        """
        return min((block for block in self.blocks if block >= first), default=first)


_NOBODY: Mapping[str, Hashable] = {}
Holdings: TypeAlias = Mapping[str, Mapping[str, Box]]
"""For each parameter and buffer the devices that hold it, in the order of the plan, and which box of it."""


def holdings_of(plan: Plan, graph: ModelGraph) -> Holdings:
    """Return who holds what. What no op reads, every device holds.

    Raises PlanError where stages on the same devices would cut the same parameter in different ways.
    """
    held: dict[str, dict[str, Box]] = {stored.name: {} for stored in (*graph.parameters, *graph.buffers)}
    again = _read_again(graph)
    for pipeline in plan.pipelines:
        for number, stage in enumerate(pipeline.stages):
            names: set[str] = set()
            for op in graph.ops[stage.ops[0] : stage.ops[1]]:
                names.update(op.parameters, *(again[source] for source in op.inputs if source in again))
            sharding = shard_stage(graph, pipeline, number)
            for name in names & held.keys():
                for device, box in zip(stage.devices, _boxes(sharding, name, stage), strict=True):
                    if held[name].setdefault(device, box) != box:
                        raise PlanError(
                            f"{name!r} is read by several stages on {', '.join(stage.devices)}, which would cut it in different ways: give "
                            "them one layout, or put these stages on other devices"
                        )
    everyone = tuple(dict.fromkeys(plan.devices))
    place = {device: number for number, device in enumerate(everyone)}
    return {
        name: dict(sorted(of.items(), key=lambda entry: place[entry[0]])) or dict.fromkeys(everyone, ())
        for name, of in held.items()
    }


def _boxes(sharding: Sharding | None, name: str, stage: Stage) -> Sequence[Box]:
    """Return the box of each device: each row has all of it."""
    if sharding is None:
        return [()] * len(stage.devices)
    return [tuple(Slice(*cut) for cut in box) for box in sharding.boxes(name)] * len(stage.rows)


def _read_again(graph: ModelGraph) -> dict[str, frozenset[str]]:
    """For each op that every stage makes again for itself, the buffers that this takes: a stage that reads it holds them too."""
    wanted = computed_again(graph)
    found: dict[str, frozenset[str]] = {}
    for op in graph.ops:
        if op.name in wanted:
            found[op.name] = frozenset(op.parameters).union(*(found[name] for name in op.inputs if name in found))
    return found


def stages_reading(pipeline: Pipeline, graph: ModelGraph) -> tuple[frozenset[str], ...]:
    """Return, for each stage, the names of the parameters that its ops read, as they are or through views that an earlier stage has
    made.
    """
    seen = _parameters_seen_through(graph)
    found = []
    for stage in pipeline.stages:
        ops = graph.ops[stage.ops[0] : stage.ops[1]]
        of_views = (seen[name] for op in ops for name in op.inputs if name in seen)
        found.append(frozenset(name for op in ops for name in op.parameters).union(*of_views))
    return tuple(found)


def gradient_buckets(
    graph: ModelGraph,
    bucket_bytes: int,
    holdings: Holdings | None = None,
    readers: Mapping[str, Hashable] = _NOBODY,
) -> tuple[Bucket, ...]:
    """Every part of every trainable parameter in exactly one bucket, one dtype and one set of owners a bucket.

    None for a model without any. ``holdings`` None: nobody is named, and nothing is cut. ``readers``: parameters of which these differ
    are not in one bucket.
    """
    first_use: dict[str, int] = {}
    blocks: dict[str, set[int]] = {}
    for block in graph.blocks:
        for position, op in enumerate(graph.ops_of(block), start=block.start):
            for name in op.parameters:
                first_use.setdefault(name, position)
                blocks.setdefault(name, set()).add(block.index)
    # A parameter that no op reads has no gradient; it is reduced all the same, last, so that all ranks agree.
    trainable = [p for p in graph.parameters if p.trainable]
    ordered = sorted(trainable, key=lambda p: first_use.get(p.name, -1), reverse=True)

    groups: list[tuple[tuple[str, ...], list[BucketPart]]] = []
    open_groups: dict[Hashable, list[BucketPart]] = {}
    filled: dict[Hashable, int] = {}
    bytes_of: dict[BucketPart, int] = {}
    for parameter in ordered:
        for box, of in _parts(parameter, holdings):
            part = BucketPart(name=parameter.name, box=box)
            bytes_of[part] = numel(box, parameter.shape) * dtype_bytes(parameter.dtype)
            key = (of, parameter.dtype, readers.get(parameter.name))
            group = open_groups.get(key)
            if group is None or filled[key] >= bucket_bytes:
                group = open_groups[key] = []
                filled[key] = 0
                groups.append((of, group))
            group.append(part)
            filled[key] += bytes_of[part]
    # The order of the last parameter of each, for only then is a bucket complete.
    groups.sort(key=lambda entry: min(first_use.get(p.name, -1) for p in entry[1]), reverse=True)
    return tuple(
        Bucket(
            index=index,
            parts=tuple(group),
            bytes=sum(bytes_of[part] for part in group),
            blocks=tuple(sorted(set().union(*(blocks.get(p.name, set()) for p in group)))),
            owners=of,
        )
        for index, (of, group) in enumerate(groups)
    )


def _parts(parameter: Parameter, holdings: Holdings | None) -> Sequence[tuple[Box, tuple[str, ...]]]:
    if holdings is None:
        return [((), ())]
    return refined(holdings[parameter.name], parameter.shape)


@lru_cache(maxsize=16)
def _parameters_seen_through(graph: ModelGraph) -> Mapping[str, frozenset[str]]:
    """For each op whose results may be in the memory of parameters, which these are.

    That is what moves no bytes, and what is made of parameters alone: whether ``reshape`` or ``contiguous`` copies depends on how a
    parameter is laid out in memory, which its capture need not know. One too many is gathered once too often, and no more.
    """
    parameters = {parameter.name for parameter in graph.parameters}
    found: dict[str, frozenset[str]] = {}
    for op in graph.ops:
        through = [found[name] for name in op.inputs if name in found]
        own = parameters.intersection(op.parameters)
        moves_nothing = op.bytes_read == op.bytes_written == ZERO
        alone = len(through) == len(op.inputs) or op.kind.endswith("_as")
        if (own or through) and (moves_nothing or alone):
            found[op.name] = frozenset(own.union(*through))
    return found

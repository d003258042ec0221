"""Which gradients are reduced together, between whom, and in what order.

Parameters are taken in the reverse of the order in which the forward first uses them, which is about the order in which the
backward completes their gradients, and are gathered in buckets of at least ``bucket_bytes`` each (Li et al., "PyTorch
Distributed", VLDB 2020, section 3.2), one bucket for each set of devices that own the same parameters. A device owns what the
ops of its stages read, so a parameter that is tied across stages has owners in all of them. Every rank, and the simulator,
must cut buckets alike, so this is a pure function.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from heterodyne.graph.cut import computed_again
from heterodyne.graph.ir import ModelGraph, Parameter
from heterodyne.plan.plan import Plan

__all__ = ["Bucket", "gradient_buckets", "owners_of", "planned_buckets"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Bucket:
    """``owners``: the devices whose gradients are summed, in the order of the plan. ``blocks``: those that read any of the parameters."""

    index: int
    parameters: tuple[str, ...]
    bytes: int
    blocks: tuple[int, ...]
    owners: tuple[str, ...] = ()

    def ready_block(self, first: int = 0) -> int:
        """The block whose backward completes the last of these gradients on a stage that begins with block ``first``.

        The backward runs the blocks from last to first, so it is the lowest that reads any of the parameters.
        """
        return min((block for block in self.blocks if block >= first), default=first)


def owners_of(plan: Plan, graph: ModelGraph) -> dict[str, tuple[str, ...]]:
    """For each parameter and buffer the devices that hold it, in the order of the plan; what no op reads, every device."""
    read: dict[str, list[str]] = {stored.name: [] for stored in (*graph.parameters, *graph.buffers)}
    again = _read_again(graph)
    for pipeline in plan.pipelines:
        for stage in pipeline.stages:
            names: set[str] = set()
            for op in graph.ops[stage.ops[0] : stage.ops[1]]:
                names.update(op.parameters, *(again[source] for source in op.inputs if source in again))
            for name in names & read.keys():
                read[name] += [device for device in stage.devices if device not in read[name]]
    everyone = tuple(dict.fromkeys(plan.devices))
    place = {device: number for number, device in enumerate(everyone)}
    return {name: tuple(sorted(devices, key=place.__getitem__)) or everyone for name, devices in read.items()}


def _read_again(graph: ModelGraph) -> dict[str, frozenset[str]]:
    """For each op that every stage makes again for itself, the buffers that this takes: a stage that reads it holds them too."""
    wanted = computed_again(graph)
    found: dict[str, frozenset[str]] = {}
    for op in graph.ops:
        if op.name in wanted:
            found[op.name] = frozenset(op.parameters).union(*(found[name] for name in op.inputs if name in found))
    return found


def planned_buckets(plan: Plan, graph: ModelGraph) -> tuple[Bucket, ...]:
    """The buckets of a plan."""
    return gradient_buckets(graph, plan.bucket_bytes, owners_of(plan, graph))


def gradient_buckets(
    graph: ModelGraph, bucket_bytes: int, owners: Mapping[str, tuple[str, ...]] | None = None
) -> tuple[Bucket, ...]:
    """Every trainable parameter in exactly one bucket, one dtype and one set of owners a bucket; none for a model without any."""
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

    groups: list[tuple[tuple[str, ...], list[Parameter]]] = []
    open_groups: dict[tuple[tuple[str, ...], str], list[Parameter]] = {}
    filled: dict[tuple[tuple[str, ...], str], int] = {}
    for parameter in ordered:
        of = () if owners is None else owners[parameter.name]
        key = (of, parameter.dtype)
        group = open_groups.get(key)
        if group is None or filled[key] >= bucket_bytes:
            group = open_groups[key] = []
            filled[key] = 0
            groups.append((of, group))
        group.append(parameter)
        filled[key] += parameter.bytes
    # The order of the last parameter of each, for only then is a bucket complete.
    groups.sort(key=lambda entry: min(first_use.get(p.name, -1) for p in entry[1]), reverse=True)
    return tuple(
        Bucket(
            index=index,
            parameters=tuple(p.name for p in group),
            bytes=sum(p.bytes for p in group),
            blocks=tuple(sorted(set().union(*(blocks.get(p.name, set()) for p in group)))),
            owners=of,
        )
        for index, (of, group) in enumerate(groups)
    )

"""Which gradients are reduced together, and in what order.

Parameters are taken in the reverse of the order in which the forward first uses them, which is about the order in which the
backward completes their gradients, and are gathered in buckets of at least ``bucket_bytes`` each (Li et al., "PyTorch
Distributed", VLDB 2020, section 3.2). Every rank, and the simulator, must cut them alike, so this is a pure function.
"""

from __future__ import annotations

from dataclasses import dataclass

from heterodyne.graph.ir import ModelGraph, Parameter

__all__ = ["Bucket", "gradient_buckets"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Bucket:
    """``ready_block``: the block whose backward completes the last of these gradients (the lowest that reads any of them)."""

    index: int
    parameters: tuple[str, ...]
    bytes: int
    ready_block: int


def gradient_buckets(graph: ModelGraph, bucket_bytes: int) -> tuple[Bucket, ...]:
    """Every trainable parameter in exactly one bucket, one dtype a bucket; none for a model without any."""
    first_use: dict[str, int] = {}
    first_block: dict[str, int] = {}
    for block in graph.blocks:
        for position, op in enumerate(graph.ops_of(block), start=block.start):
            for name in op.parameters:
                first_use.setdefault(name, position)
                first_block.setdefault(name, block.index)
    # A parameter that no op reads has no gradient; it is reduced all the same, last, so that all ranks agree.
    trainable = [p for p in graph.parameters if p.trainable]
    ordered = sorted(trainable, key=lambda p: first_use.get(p.name, -1), reverse=True)

    groups: list[list[Parameter]] = []
    filled = 0
    for parameter in ordered:
        if not groups or groups[-1][0].dtype != parameter.dtype or filled >= bucket_bytes:
            groups.append([])
            filled = 0
        groups[-1].append(parameter)
        filled += parameter.bytes
    return tuple(
        Bucket(
            index=index,
            parameters=tuple(p.name for p in group),
            bytes=sum(p.bytes for p in group),
            ready_block=min(first_block.get(p.name, 0) for p in group),
        )
        for index, group in enumerate(groups)
    )

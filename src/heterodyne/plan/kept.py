"""Which ops of a block that is computed again keep what they make, so that they are not run again.

A plan names them as people do: ``linear`` is every linear layer of the block, ``mlp.fc1.linear`` the one in that module. Alike blocks
have alike ops, so one list of names serves all blocks of a stage.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from heterodyne.graph.ir import Block, ModelGraph, Op

__all__ = ["kept_ops", "label", "names_of", "unknown", "why_not_kept"]


def label(op: Op, block: Block) -> str:
    """The module inside the block and the kind of the op; alike ops of alike blocks have the same one."""
    inside = op.module.removeprefix(block.name).removeprefix(".")
    return f"{inside}.{op.kind}" if inside else op.kind


def names_of(graph: ModelGraph, *blocks: Block) -> tuple[str, ...]:
    """The labels by which ops of these blocks can keep what they make, if all of them are computed again.

    A label without a module is a kind, and chooses all ops of that kind: it is none of these if one of them has to be run again.
    """
    ops = [(op, block) for block in blocks for op in graph.ops_of(block)]
    refused = {name for op, block in ops if why_not_kept(graph, op) is not None for name in (op.kind, label(op, block))}
    return tuple(name for name in dict.fromkeys(label(op, block) for op, block in ops) if name not in refused)


def kept_ops(graph: ModelGraph, block: Block, keep: Sequence[str]) -> tuple[Op, ...]:
    """The ops of a block that a plan's ``keep`` chooses, in order."""
    chosen = frozenset(keep)
    if not chosen:
        return ()
    return tuple(op for op in graph.ops_of(block) if not chosen.isdisjoint((op.kind, label(op, block))))


def why_not_kept(graph: ModelGraph, op: Op) -> str | None:
    """Return why an op has to be run again, as a clause; None if it need not."""
    if op.name in graph.random:
        return "draws random numbers, which have to be drawn again"
    if op.name in graph.batch_statistics:
        return "takes statistics over the batch, which all replicas do together"
    if op.memory is not None or op.writes:
        return "makes something that is changed later, so it would not be the same a second time"
    return None


def unknown(graph: ModelGraph, blocks: Iterable[Block], keep: Sequence[str]) -> list[str]:
    """The names that choose no op of these blocks."""
    known = {name for block in blocks for op in graph.ops_of(block) for name in (op.kind, label(op, block))}
    return [name for name in keep if name not in known]

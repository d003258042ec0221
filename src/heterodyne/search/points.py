"""Where a model may be cut into stages: between its blocks, and inside them where little crosses."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from itertools import accumulate

from heterodyne.graph.cut import computed_again
from heterodyne.graph.ir import Block, ModelGraph
from heterodyne.graph.size import ZERO, Size

__all__ = ["MOST_CROSSING", "Points", "points_of"]

MOST_CROSSING = 3.0  # where room does not ask for more


@dataclass(frozen=True, kw_only=True)
class Points:
    """Positions at which stages may begin or end, rising from 0 to the number of ops.

    ``crossing``: what is alive there, in samples: made before, read behind.
    """

    positions: tuple[int, ...]
    crossing: tuple[Size, ...]

    def __len__(self) -> int:
        return len(self.positions)


def points_of(
    graph: ModelGraph, *, inside: int = 0, most_crossing: float = MOST_CROSSING, tied_together: bool = False
) -> Points:
    """The borders of the blocks, and ``inside`` more positions in each block, spread over its operations. There may cross so many times
    what crosses at the lighter end of the block.

    A stage that sends nothing with a gradient would never learn, so only positions are taken that such a value crosses. A block is
    cut where its alike ones are cut. ``tied_together``: only positions that no tied weight is read on both sides of.
    """
    forth, back = _alive(graph)
    stop = len(graph.ops)
    kinds = (
        {kind: _inside(graph, block, forth, inside, most_crossing) for kind, block in graph.kinds.items()}
        if inside
        else {}
    )
    wanted = {block.start for block in graph.blocks}
    wanted |= {block.start + offset for block in graph.blocks for offset in kinds.get(block.kind, ())}
    last = stop - 1 if graph.together_from is None else graph.together_from
    inner = [position for position in sorted(wanted) if 0 < position <= last and back[position] != ZERO]
    if tied_together:
        tied = _reads(graph)
        inner = [position for position in inner if not any(first < position <= end for first, end in tied)]
    positions = (0, *inner, stop)
    return Points(
        positions=positions,
        crossing=tuple(forth[position] for position in positions),
    )


def _reads(graph: ModelGraph) -> list[tuple[int, int]]:
    """For each weight the positions of the first and the last operation that reads it."""
    found: dict[str, tuple[int, int]] = {}
    for position, op in enumerate(graph.ops):
        for name in op.parameters:
            found[name] = found.get(name, (position, position))[0], position
    return list(found.values())


def _alive(graph: ModelGraph) -> tuple[list[Size], list[Size]]:
    """For each position the bytes of the values made before and read at or behind it: of all, and of those with a gradient."""
    made_by = {op.name: position for position, op in enumerate(graph.ops)}
    again = computed_again(graph)
    last_read: dict[int, int] = {}
    for position, op in enumerate(graph.ops):
        for name in op.inputs if op.name not in again else ():
            if name in made_by and name not in again:
                last_read[made_by[name]] = position
    changes = [[ZERO] * (len(graph.ops) + 2) for _ in range(2)]
    for source, last in last_read.items():
        size = Size.total(spec.bytes for spec in graph.ops[source].outputs)
        for change in changes[: 1 + any(graph.ops[source].differentiable)]:
            change[source + 1] += size
            change[last + 1] += size * -1
    forth, back = (list(accumulate(change)) for change in changes)
    return forth, back


def _inside(graph: ModelGraph, block: Block, alive: list[Size], count: int, most_crossing: float) -> list[int]:
    """Offsets at which a block may be cut: of each of ``count`` equal parts of its work the position that the least crosses."""
    ends = [size for size in (alive[block.start](1), alive[block.stop](1)) if size > 0]
    if not ends or block.stop - block.start < 2:
        return []
    flops = [op.flops_forward(1) + op.flops_backward(1) for op in graph.ops_of(block)]
    done = list(accumulate(flops, initial=0.0))
    if done[-1] <= 0:
        return []
    found = set()
    for part in range(1, count + 1):
        low, high = (2 * part - 1) / (2 * count + 2), (2 * part + 1) / (2 * count + 2)
        first, behind = bisect_left(done, low * done[-1]), bisect_left(done, high * done[-1])
        near = range(max(1, first), min(behind, len(flops)))
        middle = part / (count + 1) * done[-1]
        crossing = {at: (alive[block.start + at](1), abs(done[at] - middle)) for at in near}
        best = min(near, key=crossing.__getitem__, default=0)
        if best and alive[block.start + best](1) <= most_crossing * min(ends):
            found.add(best)
    return sorted(found)

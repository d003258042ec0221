"""Local improvement: what stands on the critical path is moved, and what makes the whole shorter is kept.

The critical path is the chain of actions, each starting when the one before it ends, that ends last. Between two places it goes over a
transfer; on one place it is a block of actions without a wait. Only a change at the head or at the tail of such a block can
make the whole shorter (Nowicki and Smutnicki, "A fast taboo search algorithm for the job shop problem", 1996), so an action of a
block is moved before the block or behind it. Micro-batches keep going through each stage in order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from heterodyne.plan.schedules.pipeline_work import PipelineWork

__all__ = ["improved"]

Rows = list[list[int]]
_CLOSE = 1e-9  # relative: times that are as good as equal


def improved(work: PipelineWork, rows: Rows, *, plays: int, bound_s: float = 0.0) -> tuple[Rows, float]:
    """The best rows that are found from ``rows`` on with so many plays at most, and their makespan; never worse than ``rows``."""
    best = work.clock.makespan(rows)
    left = plays
    found = True
    while found and left > 0 and best > bound_s * (1 + _CLOSE):
        found = False
        for place, row in _moves(work, rows):
            if left <= 0:
                break
            tried = [row if number == place else other for number, other in enumerate(rows)]
            left -= 1
            makespan = work.clock.makespan(tried)
            if makespan < best * (1 - _CLOSE) and work.fits(row, place):
                rows, best, found = tried, makespan, True
                break
    return rows, best


def _moves(work: PipelineWork, rows: Rows) -> Iterator[tuple[int, list[int]]]:
    """A place and its changed row, for each legal move out of a block of the critical path, the nearest moves first."""
    for place, first, last in _blocks(work, rows):
        row = rows[place]
        for position in range(last - 1, first - 1, -1):
            stop = _reach(work, row, position, last, 1)
            if stop > position:
                yield place, [*row[:position], *row[position + 1 : stop + 1], row[position], *row[stop + 1 :]]
        for position in range(first + 1, last + 1):
            stop = _reach(work, row, position, first, -1)
            if stop < position:
                yield place, [*row[:stop], row[position], *row[stop:position], *row[position + 1 :]]


def _reach(work: PipelineWork, row: Sequence[int], position: int, goal: int, step: int) -> int:
    """Return how far towards ``goal`` an action may move without passing its own micro-batch, or the same work of its stage."""
    clock = work.clock
    code = row[position]
    cell, slot = code % clock.cells, clock.slot[code]
    stage, kind = cell // clock.micro_batches, slot // clock.cells
    at = position
    while at != goal:
        other = row[at + step]
        its_cell = other % clock.cells
        if its_cell == cell:
            break
        if its_cell // clock.micro_batches == stage and clock.slot[other] // clock.cells == kind:
            break
        at += step
    return at


def _blocks(work: PipelineWork, rows: Rows) -> list[tuple[int, int, int]]:
    """(place, first, last) of the runs of two and more actions of the critical path, from its end to its beginning."""
    clock = work.clock
    starts, ends = clock.run(rows)
    made_at = {clock.slot[code]: (place, n) for place, row in enumerate(rows) for n, code in enumerate(row)}
    place = max(range(len(rows)), key=lambda p: ends[p][-1] if ends[p] else 0.0)
    position = last = len(rows[place]) - 1
    blocks = []
    while position >= 0:
        start = starts[place][position]
        before = None
        for slot, lag in clock.sources(rows[place][position]):
            other, its = made_at[slot]
            if other != place and ends[other][its] + lag >= start:
                before = (other, its)
        if before is None and position > 0 and ends[place][position - 1] >= start:
            position -= 1
            continue
        if last > position:
            blocks.append((place, position, last))
        if before is None:
            break
        place, position = before
        last = position
    return blocks

"""Stage boundaries are moved while that shortens the simulated pipeline: balance alone does not see bubbles.

AutoPipe (Liu et al., CLUSTER 2022) simulates 1F1B, finds the stage on the critical path and moves blocks out of it. Here every boundary
is tried in both directions with the orders that were found, and the best move is made, a bounded number of times.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from heterodyne.cost.compute import Pass
from heterodyne.plan.schedules import Orders
from heterodyne.plan.schedules.clock import Clock
from heterodyne.plan.schedules.times import Read, StageTimes
from heterodyne.search.drafts import Draft, Drafting

__all__ = ["refined"]

_CLOSE = 1e-6


def refined(draft: Draft, drafting: Drafting, orders: Orders, reads: Sequence[Read], *, rounds: int) -> Draft:
    """The draft with its borders where the orders end soonest; itself if no move helps. Every stage keeps to its memory."""
    times = [_times(draft, drafting, stage, draft.points) for stage in range(len(draft.place_of))]
    best = _makespan(draft, times, orders, reads)
    for _ in range(rounds):
        found = None
        for border in range(1, len(draft.points) - 1):
            for step in (-1, 1):
                points = list(draft.points)
                points[border] += step
                if not points[border - 1] < points[border] < points[border + 1]:
                    continue
                if not all(drafting.fits(draft, stage, points) for stage in (border - 1, border)):
                    continue
                tried = list(times)
                for stage in (border - 1, border):
                    tried[stage] = _times(draft, drafting, stage, points)
                makespan = _makespan(draft, tried, orders, reads)
                if makespan < best * (1 - _CLOSE):
                    best, found = makespan, (tuple(points), tried)
        if found is None:
            break
        points_, times = found
        borders = tuple(drafting.points.positions[at] for at in points_)
        draft = replace(draft, points=points_, borders=borders)
    return draft


def _makespan(draft: Draft, times: Sequence[StageTimes], orders: Orders, reads: Sequence[Read]) -> float:
    clock = Clock(times, draft.place_of, len(draft.micro_batches), reads)
    return clock.makespan(clock.encode(orders))


def _times(draft: Draft, drafting: Drafting, stage: int, points: Sequence[int]) -> StageTimes:
    """The mean micro-batch of a stage."""
    device, sizes = draft.line[draft.place_of[stage]], Counter(draft.micro_batches.sizes)

    def mean_s(kind: Pass) -> float:
        sums = {size: drafting.tables.seconds(device, kind, size) for size in sizes}
        spent = (max(0.0, float(sums[n][points[stage + 1]] - sums[n][points[stage]])) * sizes[n] for n in sizes)
        return sum(spent) / len(draft.micro_batches)

    return StageTimes(forward_s=mean_s("H"), input_s=mean_s("I"), weight_s=mean_s("W"))

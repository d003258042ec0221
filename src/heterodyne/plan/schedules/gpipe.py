"""GPipe (Huang et al., NeurIPS 2019): every micro-batch forward, then every micro-batch backward.

Bubble (p-1)/(m+p-1); all m micro-batches are held at once. With several stages a place, each stage takes all micro-batches
before the next one begins (breadth first).
"""

from __future__ import annotations

from collections.abc import Sequence

from heterodyne.plan.program import Action
from heterodyne.plan.schedules.schedule import Orders, Schedule, stage_places

__all__ = ["GPIPE", "stage_by_stage"]


def stage_by_stage(place_of_stage: Sequence[int], micro_batches: int, *, turn: bool = False) -> Orders:
    """Return the orders for stages on any places. ``turn``: in the last stage each backward follows its forward."""
    indices, last = range(micro_batches), len(place_of_stage) - 1
    rows: list[list[Action]] = [[] for _ in set(place_of_stage)]
    for stage, place in enumerate(place_of_stage):
        for index in indices:
            rows[place].append(Action(stage, "F", index))
            if turn and stage == last:
                rows[place].append(Action(stage, "B", index))
    for stage in reversed(range(last if turn else last + 1)):
        rows[place_of_stage[stage]] += (Action(stage, "B", index) for index in indices)
    return tuple(map(tuple, rows))


def _orders(places: int, chunks: int, micro_batches: int) -> Orders:
    return stage_by_stage(stage_places("loop", places, chunks), micro_batches)


GPIPE = Schedule(name="GPipe", placement="loop", chunks=None, make=_orders, all_at_once=True)

"""GPipe (Huang et al., NeurIPS 2019): every micro-batch forward, then every micro-batch backward.

Bubble (p-1)/(m+p-1); all m micro-batches are held at once. With several stages a place, each stage takes all micro-batches
before the next one begins (breadth first).
"""

from __future__ import annotations

from heterodyne.plan.program import Action
from heterodyne.plan.schedules.schedule import Orders, Schedule

__all__ = ["GPIPE"]


def _orders(places: int, chunks: int, micro_batches: int) -> Orders:
    return tuple(_place(range(place, places * chunks, places), micro_batches) for place in range(places))


def _place(stages: range, micro_batches: int) -> tuple[Action, ...]:
    return (
        *(Action(stage, "F", index) for stage in stages for index in range(micro_batches)),
        *(Action(stage, "B", index) for stage in reversed(stages) for index in range(micro_batches)),
    )


GPIPE = Schedule(name="GPipe", placement="loop", chunks=None, make=_orders, all_at_once=True)

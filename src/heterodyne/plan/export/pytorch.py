"""The schedules that PyTorch makes itself, and the micro-batches that it takes under each (``torch.distributed.pipelining.schedules``)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from heterodyne.errors import PlanError
from heterodyne.plan.export.even_plan import EvenPlan
from heterodyne.plan.schedules import SCHEDULES
from heterodyne.plan.schedules.csv_file import format_csv
from heterodyne.plan.schedules.interleaved import round_count

__all__ = ["PYTORCH_SCHEDULES", "pytorch_takes", "schedule_csv"]


def _any(_: EvenPlan) -> bool:
    return True


def _one_a_stage(plan: EvenPlan) -> bool:
    return plan.num_microbatches >= len(plan.layers_per_stage)


def _full_rounds(plan: EvenPlan) -> bool:
    return plan.num_microbatches % round_count(plan.pp, plan.num_microbatches) == 0


PYTORCH_SCHEDULES: Final[Mapping[str, Callable[[EvenPlan], bool]]] = {
    "1F1B": _one_a_stage,
    "GPipe": _any,
    "Interleaved1F1B": _full_rounds,
    "InterleavedZeroBubble": _full_rounds,
    "ZBVZeroBubble": _any,
    "DualPipeV": _one_a_stage,
}
"""By name: whether it takes the micro-batches of a plan."""


def pytorch_takes(plan: EvenPlan) -> bool:
    """Return whether PyTorch makes the orders of the plan itself; else they go to it as CSV."""
    takes = PYTORCH_SCHEDULES.get(plan.schedule)
    return plan.pp == 1 or (takes is not None and takes(plan))


def schedule_csv(plan: EvenPlan) -> str:
    """A row a place of the pipeline, a cell an action (``0F0``, ``0B0``). Raises PlanError for a schedule that is not known."""
    schedule = SCHEDULES.get(plan.schedule)
    if schedule is None:
        raise PlanError(f"schedule {plan.schedule!r} is not known; it can be {', '.join(SCHEDULES)}")
    return format_csv(schedule.orders(plan.pp, plan.vpp, plan.num_microbatches))

"""The schedule of an even plan as the CSV that PyTorch reads."""

from __future__ import annotations

from heterodyne.errors import PlanError
from heterodyne.plan.export.even_plan import EvenPlan
from heterodyne.plan.schedules import SCHEDULES
from heterodyne.plan.schedules.csv_file import format_csv

__all__ = ["schedule_csv"]


def schedule_csv(plan: EvenPlan) -> str:
    """A row a place of the pipeline, a cell an action (``0F0``, ``0B0``). Raises PlanError for a schedule that is not known."""
    schedule = SCHEDULES.get(plan.schedule)
    if schedule is None:
        raise PlanError(f"schedule {plan.schedule!r} is not known; it can be {', '.join(SCHEDULES)}")
    return format_csv(schedule.orders(plan.pp, plan.vpp, plan.num_microbatches))

"""What was passed to `distribute`, checked before anything is captured."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

from heterodyne.errors import HeterodyneError
from heterodyne.plan.plan import Plan
from heterodyne.search.planned import Strategy

__all__ = ["wanted_plan"]


def wanted_plan(plan: Plan | Path | str) -> tuple[Strategy, Plan | None]:
    """The strategy to search with, and the plan that is given instead."""
    if isinstance(plan, Plan):
        return "auto", plan
    if plan in get_args(Strategy):
        return plan, None  # type: ignore[return-value]  # the test narrows it
    path = Path(plan)
    if not path.exists():
        raise HeterodyneError(f"plan={str(plan)!r} is neither {', '.join(get_args(Strategy))} nor a file")
    return "auto", Plan.load(path)

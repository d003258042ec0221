"""What was passed to `distribute`, as far as one argument rules another,
checked before anything is captured; see `heterodyne.arguments`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, get_args

from torch.optim import Optimizer

from heterodyne.errors import HeterodyneError, JobError
from heterodyne.job import OptimizerSection
from heterodyne.plan.plan import Plan
from heterodyne.runtime.weights.optimizer import OptimizerFactory
from heterodyne.search.planned import Strategy
from heterodyne.tracker_options import tracker_options

__all__ = ["chosen_optimizer", "require_sound_together", "wanted_plan"]

_SCHEDULE = {"schedule", "min_lr_ratio"}


def require_sound_together(arguments: Mapping[str, Any]) -> None:
    """Raises HeterodyneError with all that is wrong with the arguments of `distribute`, by name."""
    wrong = list(_faults(arguments))
    if wrong:
        raise HeterodyneError("\n  ".join(["distribute cannot take these arguments:", *wrong]))


def chosen_optimizer(
    optimizer: OptimizerSection | OptimizerFactory | Optimizer | None, total_steps: int | None
) -> OptimizerSection | OptimizerFactory | Optimizer:
    """What trains: a rate that follows a schedule only where its length is known, a constant one else.

    Raises HeterodyneError for a section that asks for a schedule whose length nobody says.
    """
    if optimizer is not None and not isinstance(optimizer, OptimizerSection):
        return optimizer
    section = OptimizerSection() if optimizer is None else optimizer
    if total_steps is not None or section.schedule == "constant":
        return section
    asked = sorted(_SCHEDULE & section.model_fields_set)
    if asked:
        raise HeterodyneError(
            f"the optimizer's {' and '.join(asked)} need to know how long the schedule is: pass total_steps=, or schedule='constant'"
        )
    return section.model_copy(update={"schedule": "constant"})


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


def _faults(given: Mapping[str, Any]) -> Iterator[str]:
    if given["loss"] is None and given["loss_inputs"]:
        yield "loss_inputs says what only a loss outside of the model reads: pass that as loss= too"
    if given["resume"] and given["run_dir"] is None:
        yield "resume goes on with the run in a directory: pass run_dir= too"
    try:
        tracker_options(given["trackers"])
    except JobError as error:
        yield str(error)
    if given["trackers"] and given["run_dir"] is None:
        yield "trackers write into the directory of the run: pass run_dir= too"

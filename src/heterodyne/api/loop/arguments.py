"""What was passed to `distribute`, checked before anything is captured."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, get_args

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from heterodyne.api.loop.weights_back import WeightsAtEnd
from heterodyne.errors import HeterodyneError, JobError
from heterodyne.job import OptimizerSection
from heterodyne.plan.plan import Plan
from heterodyne.runtime.weights.optimizer import OptimizerFactory
from heterodyne.search.planned import Strategy
from heterodyne.tracker_options import tracker_options

__all__ = ["chosen_optimizer", "require_sound", "wanted_plan"]

_PRECISIONS = ("fp32", "bf16", "fp16", "auto")
_SCHEDULE = {"schedule", "min_lr_ratio"}


def require_sound(arguments: Mapping[str, Any]) -> None:
    """Raises HeterodyneError with all that is wrong with the arguments of `distribute`, by name."""
    wrong = list(_faults(arguments))
    if wrong:
        raise HeterodyneError("\n  ".join(["distribute cannot take these arguments:", *wrong]))


def chosen_optimizer(
    optimizer: OptimizerSection | OptimizerFactory | None, total_steps: int | None
) -> OptimizerSection | OptimizerFactory:
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
    if not isinstance(given["model"], nn.Module):
        yield f"model is {_described(given['model'])}, not an nn.Module"
    yield from _of_optimizer(given["optimizer"])
    if not isinstance(given["plan"], Plan | Path | str):
        yield f"plan is {_described(given['plan'])}; it is a strategy ({', '.join(get_args(Strategy))}), a Plan, or the path of one"
    yield from _of_precision(given["precision"])
    yield from _of_whole_numbers(given)
    yield from _of_seconds_and_norms(given)
    if isinstance(given["loss"], type):
        yield f"loss is the class {given['loss'].__name__}; make one of it: loss={given['loss'].__name__}()"
    elif given["loss"] is not None and not callable(given["loss"]):
        yield f"loss is {_described(given['loss'])}; it is a function of the model's output and the target (or the batch)"
    if given["loss"] is None and given["loss_inputs"]:
        yield "loss_inputs says what only a loss outside of the model reads: pass that as loss= too"
    if given["weights_at_end"] not in get_args(WeightsAtEnd):
        yield f"weights_at_end is {_described(given['weights_at_end'])}, not one of {', '.join(get_args(WeightsAtEnd))}"
    if given["resume"] and given["run_dir"] is None:
        yield "resume goes on with the run in a directory: pass run_dir= too"
    yield from _of_trackers(given["trackers"], given["run_dir"])
    for name in ("loss_inputs", "shared"):
        if isinstance(given[name], str):
            yield f"{name} is a text; write a tuple, ({given[name]!r},)"


def _of_trackers(trackers: object, run_dir: object) -> Iterator[str]:
    if not isinstance(trackers, tuple | list):
        yield f"trackers is {_described(trackers)}; it is a list of names, or of mappings from a name to its options"
        return
    try:
        tracker_options(trackers)
    except JobError as error:
        yield str(error)
    if trackers and run_dir is None:
        yield "trackers write into the directory of the run: pass run_dir= too"


def _of_optimizer(optimizer: object) -> Iterator[str]:
    if isinstance(optimizer, torch.optim.Optimizer):
        name, rate = type(optimizer).__name__, optimizer.param_groups[0].get("lr")
        yield (
            f"optimizer is made already, an {name}; each rank makes one of the parameters that it holds, so pass the function that "
            f"makes it: optimizer=lambda parameters: {name}(parameters, lr={rate}), or with groups by name "
            f"optimizer=lambda named_parameters: {name}(...)"
        )
    elif isinstance(optimizer, LRScheduler):
        yield "optimizer is a scheduler of the rate; make it of trainer.optimizer, and step it on every rank"
    elif not (optimizer is None or isinstance(optimizer, OptimizerSection) or callable(optimizer)):
        yield (
            f"optimizer is {_described(optimizer)}; it is an OptimizerSection(name='adamw', lr=...), or a function that makes an "
            "optimizer from parameters"
        )


def _of_precision(precision: object) -> Iterator[str]:
    if precision in _PRECISIONS:
        return
    hints: dict[object, str] = {
        torch.float32: ": write 'fp32'",
        torch.bfloat16: ": write 'bf16'",
        torch.float16: ": write 'fp16'",
    }
    hint = hints.get(precision, "") if isinstance(precision, str | torch.dtype) else ""
    yield f"precision is {precision!r}, not {' or '.join(map(repr, _PRECISIONS))}{hint}"


def _of_whole_numbers(given: Mapping[str, Any]) -> Iterator[str]:
    for name in ("global_batch_size", "total_steps"):
        value = given[name]
        if value is not None and not _positive_whole(value):
            yield f"{name} is {_described(value)}; it is a whole number from 1 on, or None"
    sizes = given["micro_batch_sizes"]
    if sizes != "auto" and (not isinstance(sizes, tuple | list) or not sizes or not all(map(_positive_whole, sizes))):
        yield f"micro_batch_sizes is {_described(sizes)}; it is a tuple of whole numbers from 1 on, such as (1, 2, 4, 8), or 'auto'"
    if not isinstance(given["seed"], int):
        yield f"seed is {_described(given['seed'])}; it is a whole number"


def _of_seconds_and_norms(given: Mapping[str, Any]) -> Iterator[str]:
    for name, meaning in (
        ("clip_grad_norm", "the largest norm of the gradient, or 0 for no clipping"),
        ("measure_s", "seconds"),
        ("rehearsal_s", "seconds, or 0 for no rehearsal"),
        ("check_s", "seconds, or 0 for no check"),
    ):
        value = given[name]
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not number or not math.isfinite(value) or value < 0:
            yield f"{name} is {_described(value)}; it is {meaning}: finite, and not negative"


def _positive_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _described(value: object) -> str:
    return repr(value) if isinstance(value, int | float | str | tuple | list | None) else f"a {type(value).__name__}"

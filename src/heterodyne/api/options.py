"""What `distribute` is asked for beside model, batch and optimizer, by subject: the loss, the plan, the run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

from torch.optim import Optimizer

from heterodyne.api.loop.callbacks import Callback
from heterodyne.api.loop.model_with_loss import LossFunction
from heterodyne.api.loop.weights_back import WeightsAtEnd
from heterodyne.arguments import checked_options
from heterodyne.cluster.profile import Profile
from heterodyne.documents import validate
from heterodyne.errors import HeterodyneError, JobError, PlanError
from heterodyne.frontend.opaque import CountGiven
from heterodyne.job import OptimizerSection, ParallelismSection, Strategy
from heterodyne.plan.plan import Plan
from heterodyne.runtime.weights.optimizer import OptimizerFactory
from heterodyne.tracker_options import tracker_options

__all__ = [
    "AnyOptimizer",
    "LossOptions",
    "PlanOptions",
    "RunOptions",
    "chosen_optimizer",
    "loss_options",
    "wanted_plan",
]

AnyOptimizer: TypeAlias = Optimizer | OptimizerFactory | OptimizerSection

_SCHEDULE = {"schedule", "min_lr_ratio"}


@checked_options
@dataclass(frozen=True)
class LossOptions:
    """How the loss is computed, where a function alone does not say it.

    Args:
        function: a loss outside of the model, as ``loss=function``; None: the model returns its loss.
        only: entries of a mapping that only the loss reads, such as ``("labels",)``: the model is not called with them though it would
            accept them.
        loss_count: what the loss divides by, as ``model.loss_count`` of a job, for a model that torch.export gives no graph of:
            ``samples`` (a mean over samples that all count alike), ``sum``, or a function of a batch, or part of one, that counts. Such a
            model is trained by data parallelism.
    """

    function: LossFunction | None = None
    _: KW_ONLY
    only: Sequence[str] = ()
    loss_count: CountGiven | None = None

    def __post_init__(self) -> None:
        if self.function is None and self.only:
            raise HeterodyneError("LossOptions(only=) names what only a loss outside of the model reads: pass that too")


@checked_options
@dataclass(frozen=True)
class PlanOptions:
    """How a plan is found.

    Args:
        plan: as ``plan=`` of `distribute`: the name of a strategy, a Plan, or the path of one.
        micro_batch_sizes: the sizes that are measured and tried; ``auto``: 1, 2, 4, and so on, while larger ones are faster on any device.
        measure_s: about the seconds that measuring may take; ``auto``: a quarter of ``total_steps``, from 10 to 60 s.
        rehearsal_s: those in which the plans that are predicted to be nearly the fastest are run; 0 to believe the prediction; ``auto``: a
            twentieth of ``total_steps``, 30 s at most.
        check_s: those that may be spent on comparing the captured graph and the parts of a batch with the model itself, once a model
            and before anything is measured; 0 to leave it out.
        profile: what was measured before; None: measured now, or taken from the cache where it still holds.
        asynchronous: ``"predicted"``: as ``parallelism.async`` of a job: pipelines that are not flushed, with predicted weights. Inexact.
    """

    plan: Plan | Path | str = "auto"
    _: KW_ONLY
    micro_batch_sizes: Sequence[int] | Literal["auto"] = "auto"
    measure_s: float | Literal["auto"] = "auto"
    rehearsal_s: float | Literal["auto"] = "auto"
    check_s: float = 10.0
    profile: Profile | None = None
    asynchronous: Literal["predicted"] | None = None

    def __post_init__(self) -> None:
        if isinstance(self.plan, PlanOptions):
            raise HeterodyneError(
                "PlanOptions are given for plan= of distribute; their own plan is a strategy, a Plan, or the path of one"
            )

    def section(self, strategy: Strategy) -> ParallelismSection:
        """Return the same as a job says it, for a strategy by name. Raises PlanError for what does not go together."""
        sizes = self.micro_batch_sizes
        fields: dict[str, object] = {
            "strategy": strategy,
            "micro_batch_sizes": "auto" if sizes == "auto" else tuple(sizes),
            "measure_s": self.measure_s,
            "rehearsal_s": self.rehearsal_s,
            "check_s": self.check_s,
            "asynchronous": self.asynchronous,
        }
        return validate(ParallelismSection, fields, error=PlanError)


@checked_options
@dataclass(frozen=True)
class RunOptions:
    """What is kept of a run, and who hears of its steps.

    Args:
        dir: a new directory for metrics, plan, timelines and checkpoints, which ``heterodyne report`` reads; None: nothing is kept.
        resume: the directory may be that of a run, which goes on from its newest checkpoint if it has one. The plan then asks no more of a
            device than it was seen to have when its memory ended.
        trackers: that get the metrics beside the directory, as in ``metrics.trackers`` of a job: ``["tensorboard", {"wandb": {"project":
            "mine"}}]``. One that hangs or fails costs a warning.
        callbacks: called on every rank after steps, validations and saves.
        weights_at_end: the ranks in whose model all trained weights are when it is closed, in host memory where the plan cuts the model.
    """

    dir: Path | str | None = None
    _: KW_ONLY
    resume: bool = False
    trackers: Sequence[str | Mapping[str, Any]] = ()
    callbacks: Sequence[Callback] = ()
    weights_at_end: WeightsAtEnd = "all"

    def __post_init__(self) -> None:
        wrong = []
        if self.resume and self.dir is None:
            wrong.append("resume goes on with the run in a directory: pass dir= too")
        try:
            tracker_options(self.trackers)
        except JobError as error:
            wrong.append(str(error))
        if self.trackers and self.dir is None:
            wrong.append("trackers write into the directory of the run: pass dir= too")
        if wrong:
            raise HeterodyneError("\n  ".join(["RunOptions cannot take these arguments:", *wrong]))


def loss_options(loss: LossFunction | LossOptions | None) -> LossOptions:
    """Return the options of a loss, which may be given as a function alone."""
    return loss if isinstance(loss, LossOptions) else LossOptions(loss)


def wanted_plan(plan: PlanOptions | Plan | Path | str) -> tuple[PlanOptions, Strategy, Plan | None]:
    """Return the options, the strategy to search with, and the plan that is given instead.

    Raises HeterodyneError for a name that is neither a strategy nor a file, PlanError for a file that holds no plan.
    """
    options = plan if isinstance(plan, PlanOptions) else PlanOptions(plan)
    chosen = options.plan
    if isinstance(chosen, Plan):
        return options, "auto", chosen
    if chosen in get_args(Strategy):
        return options, chosen, None  # type: ignore[return-value]  # the test narrows it
    if not Path(chosen).exists():
        raise HeterodyneError(f"plan={str(chosen)!r} is neither {', '.join(get_args(Strategy))} nor a file")
    return options, "auto", Plan.load(chosen)


def chosen_optimizer(optimizer: AnyOptimizer | None, total_steps: int | None) -> AnyOptimizer:
    """Return what trains: a rate that follows a schedule only where its length is known, a constant one else.

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
            f"the optimizer's {' and '.join(asked)} cannot be without the length of the schedule: pass total_steps=, or schedule='constant'"
        )
    return section.model_copy(update={"schedule": "constant"})

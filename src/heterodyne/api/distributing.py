"""From a model and an example batch to a trainer: capture, measure, plan, and make ready to train."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from heterodyne.api.as_it_is import AsItIs
from heterodyne.api.capturing import capture_everywhere
from heterodyne.api.compiled import uncompiled, with_compiled
from heterodyne.api.distributed import Distributed
from heterodyne.api.learned_memory import as_learned
from heterodyne.api.loop.arguments import chosen_optimizer, require_sound_together, wanted_plan
from heterodyne.api.loop.batches import BatchLike, batch_format
from heterodyne.api.loop.callbacks import Callback
from heterodyne.api.loop.model_with_loss import LossFunction, names_of, with_loss
from heterodyne.api.loop.remade_optimizer import remade, take_over
from heterodyne.api.loop.weights_back import WeightsAtEnd
from heterodyne.api.loop.whole import copies_of, whole_model
from heterodyne.api.memory_ends import lacked_so_far, noted_shortage, told_with_shortages
from heterodyne.api.optimizer_reach import reach_everywhere, reach_of_section
from heterodyne.api.precision import resolved
from heterodyne.api.preparation import prepare
from heterodyne.api.rank_worker import make_worker
from heterodyne.api.run_files import open_run, write_plan_files
from heterodyne.api.script_end import left_with_script
from heterodyne.api.session import Session, open_session
from heterodyne.api.settings import Settings
from heterodyne.arguments import checked_arguments
from heterodyne.around_model import unchanged_around
from heterodyne.cluster.profile import Profile
from heterodyne.frontend.opaque import CountGiven
from heterodyne.job import OptimizerSection, ParallelismSection
from heterodyne.plan.plan import Plan
from heterodyne.plan.precision import precision_of
from heterodyne.runtime.records.recorder import Recorder
from heterodyne.runtime.records.shortages import Shortage
from heterodyne.runtime.slices import BatchSource, as_source
from heterodyne.runtime.weights.optimizer import OptimizerFactory, require_optimizer_library
from heterodyne.runtime.weights.trainable import trainable_parameters
from heterodyne.tracker_options import tracker_options

__all__ = ["distribute"]


@checked_arguments
def distribute(
    model: nn.Module,
    example_batch: BatchLike,
    *,
    loss: LossFunction | None = None,
    loss_inputs: Sequence[str] = (),
    shared: Sequence[str] = (),
    optimizer: Optimizer | OptimizerFactory | OptimizerSection | None = None,
    plan: Plan | Path | str = "auto",
    global_batch_size: int | None = None,
    micro_batch_sizes: Sequence[int] | Literal["auto"] = "auto",
    precision: Literal["fp32", "bf16", "fp16", "auto"] = "fp32",
    clip_grad_norm: float = 0.0,
    total_steps: int | None = None,
    seed: int = 0,
    session: Session | None = None,
    profile: Profile | None = None,
    measure_s: float | Literal["auto"] = "auto",
    rehearsal_s: float | Literal["auto"] = "auto",
    loss_count: CountGiven | None = None,
    run_dir: Path | str | None = None,
    resume: bool = False,
    trackers: Sequence[str | Mapping[str, Any]] = (),
    callbacks: Sequence[Callback] = (),
    weights_at_end: WeightsAtEnd = "all",
    check_s: float = 10.0,
    compile: bool = False,
    deterministic: bool = True,
    tf32: bool = False,
) -> Distributed:
    """Capture, measure, plan, and make ready to train. Every rank of a torchrun (or of our launcher) calls it.

    Args:
        model: returns its loss when it is called with a batch, or its outputs where ``loss`` is given. Rank 0's weights count, the
            others get them.
        example_batch: a global batch, or any part of one: a tensor, a tuple or list of tensors (as a DataLoader's), or a mapping from
            names to tensors. Later batches have the same form. Dim 0 is the batch.
        loss: a function outside of the model that returns the loss. A batch ``(x, y)`` gives ``loss(model(x), y)``: the last tensor of
            a tuple is the target, so a criterion of torch.nn can be passed as it is. A mapping gives ``loss(output, batch)``; the model is
            called with those entries that its forward names, with all of them if it takes ``**kwargs``. A tensor gives
            ``loss(model(x), x)``.
        loss_inputs: entries of a mapping that the model is not called with though it would accept them, such as ``("labels",)``.
        shared: entries of the batch that all samples share, such as ``("mask",)``: every device gets them whole. Those whose dim 0 is not
            of the batch size are known to be such. A tensor of a tuple goes by the name that forward gives it.
        optimizer: of torch.optim, made of the model's parameters: it becomes that of the rank, so the script's schedulers and hooks go
            on with it; or a function from parameters to an optimizer, which gets ``(name, parameter)`` pairs if its first argument is
            called ``named_parameters``. The planner takes both for an AdamW. Or a section as in a job file (AdamW with its defaults if
            None).
        plan: a strategy (``auto``, ``data``, ``pipeline``, ``split``, ``context``, ``equal``, ``fastest``; see a job's section
            ``parallelism``), a Plan, or the path of one.
        global_batch_size: samples of a step; None: those of the example.
        micro_batch_sizes: the sizes that are measured and tried; ``auto``: 1, 2, 4, and so on, while larger ones are faster on any device.
        clip_grad_norm: by the true global norm; 0 for none.
        total_steps: how long a section's schedule of the learning rate is; None: the rate is constant after the warm-up.
        session: None: one is opened, and closed with the result.
        profile: what was measured before; None: measured now, or taken from the cache where it still holds.
        measure_s: about the seconds that measuring may take; ``auto``: a quarter of ``total_steps``, from 10 to 60 s.
        rehearsal_s: those in which the plans that are predicted to be nearly the fastest are run; 0 to believe the prediction; ``auto``: a
            twentieth of ``total_steps``, 30 s at most.
        loss_count: what the loss divides by, for a model that torch.export gives no graph of: ``samples`` (a mean over samples that all
            count alike), ``sum``, or a function of a batch, or part of one, that counts. Such a model is trained by data parallelism.
        run_dir: a new directory for metrics, plan, timelines and checkpoints, which ``heterodyne report`` reads.
        resume: the run directory may be that of a run, which goes on from its newest checkpoint if it has one. The plan then asks no more
            of a device than it was seen to have when its memory ended.
        trackers: that get the metrics beside the run directory, as in ``metrics.trackers`` of a job: ``["tensorboard", {"wandb":
            {"project": "mine"}}]``. One that hangs or fails costs a warning.
        callbacks: called on every rank after steps, validations and saves.
        weights_at_end: the ranks in whose model all trained weights are when it is closed, in host memory where the plan cuts the model.
        check_s: those that may be spent on comparing the captured graph and the parts of a batch with the model itself, once a model
            and before anything is measured; 0 to leave it out.
        compile: stages and whole models run as code that torch.compile makes; see ``training.compile`` of a job.
        deterministic, tf32: as in ``training`` of a job, of the session that is opened here; one that is given has its own.

    Raises HeterodyneError for arguments that cannot be, DataError, CaptureError, VerifyError, MeasureError, InfeasibleError or PlanError.
    """
    require_sound_together(locals())
    chosen = chosen_optimizer(optimizer, total_steps)
    section = chosen if isinstance(chosen, OptimizerSection) else OptimizerSection()
    strategy, given = wanted_plan(plan)
    inside = uncompiled(model)
    format = batch_format(inside, example_batch, has_loss=loss is not None)
    example, size = _example(format.named(example_batch))
    module = inside if loss is None else with_loss(inside, loss, format, example, withheld=loss_inputs)
    running = with_compiled(module, model)
    closing = ExitStack()
    # The random numbers that the script draws later, in what order it shuffles its data, are those of the script without this call.
    # So is what its hooks write, which copies of the model call too.
    with ExitStack() as stack, torch.random.fork_rng(devices=[]), unchanged_around(inside):
        here = stack.enter_context(open_session(deterministic=deterministic, tf32=tf32)) if session is None else session
        called = stack.enter_context(ExitStack())  # until the trainer is made, or an error leaves this function
        called.enter_context(here.calling("distribute()"))
        run = None if run_dir is None else open_run(here, Path(run_dir), resume=resume)
        shortages: tuple[Shortage, ...] = ()
        if run is not None:
            stack.enter_context(noted_shortage(here, run))
            lacked = lacked_so_far(here, run)
            shortages = () if given is not None else lacked  # a plan that is given is obeyed
            here = replace(here, cluster=as_learned(here.cluster, shortages))
        here.together(lambda: require_optimizer_library(section))
        precisions = resolved(here, precision)
        own_precision = precision_of(precisions, here.cluster.devices[here.rank].kind)
        as_it_is = AsItIs(
            build=copies_of(module),
            loss_count=loss_count,
            strategy="auto" if given else strategy,
            precision=own_precision,
        )
        captured = capture_everywhere(here, module, example, as_it_is, name=type(inside).__name__, shared=shared)
        own = (
            [name for name, weight in loss.named_parameters() if weight.requires_grad]
            if isinstance(loss, nn.Module)
            else []
        )
        if own:
            here.say(
                f"the loss has weights of its own ({', '.join(own[:3])}): the optimizer gets them with those of the model, and no other "
                "optimizer is needed for them"
            )
        if isinstance(chosen, OptimizerSection):
            factory = None
        else:
            factory = remade(chosen, module) if isinstance(chosen, Optimizer) else names_of(module).of_factory(chosen)
        settings = Settings(
            global_batch_size=global_batch_size or size or as_source(example, captured.graph).size,
            precision=precisions,
            optimizer=section,
            parallelism=ParallelismSection(
                strategy=strategy,
                micro_batch_sizes="auto" if micro_batch_sizes == "auto" else tuple(micro_batch_sizes),
                measure_s=measure_s,
                rehearsal_s=rehearsal_s,
                check_s=check_s,
            ),
            compile=compile,
            training_steps=total_steps,
            reach=reach_of_section(section)
            if factory is None
            # Nothing here holds on to the parameters: those that the plan has elsewhere go when the worker is made.
            else reach_everywhere(
                here,
                factory,
                trainable_parameters(module, captured.graph),
            ),
        )
        with told_with_shortages(shortages):
            prepared = prepare(
                here,
                captured,
                whole_model(running, captured, example),
                settings,
                given=given,
                profile=profile,
            )
        recorder = Recorder(rank=here.rank, device=here.device)
        worker = make_worker(
            here,
            prepared,
            running,
            optimizer=factory or section,
            total_steps=total_steps or 1,
            seed=seed,
            clip_grad_norm=clip_grad_norm,
            recorder=recorder,
            compile=compile,
            whole_weights=settings.reach.reach != "element",
        )
        if isinstance(chosen, Optimizer):
            take_over(chosen, worker.optimizer)
        if running is not module and not compile and not worker.runs_compiled:
            here.say(
                "the model is compiled, and its compiled code does not run: the plan runs pieces of its graph, or dropout or BatchNorm are "
                "replaced by ones that give what one device gives"
            )
        if run is not None:
            here.agreement.only_on_rank0(lambda: write_plan_files(run, here, prepared))
        trainer = Distributed(
            model=inside,
            format=format,
            session=here,
            prepared=prepared,
            worker=worker,
            recorder=recorder,
            run=run,
            trackers=tracker_options(trackers),
            callbacks=callbacks,
            weights_at_end=weights_at_end,
            closing=closing,
        )
        called.close()
        if resume:
            trainer.load_checkpoint()
        closing.push(stack.pop_all())
        closing.enter_context(left_with_script(trainer._leave_with_script))
        return trainer


def _example(batch: Mapping[str, Tensor] | BatchSource) -> tuple[Mapping[str, Tensor], int | None]:
    """The tensors of an example, and its size where it states one."""
    return (batch.samples(0, batch.size), batch.size) if isinstance(batch, BatchSource) else (batch, None)

"""From a model and an example batch to a profile, or to a trainer: capture, measure, plan, and make ready to train."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Literal

import torch
from torch import nn
from torch.optim import Optimizer

from heterodyne.api.distributed import Distributed
from heterodyne.api.learned_memory import as_learned
from heterodyne.api.loop.batches import BatchLike
from heterodyne.api.loop.model_with_loss import LossFunction
from heterodyne.api.loop.remade_optimizer import take_over
from heterodyne.api.measuring import measure_everywhere
from heterodyne.api.memory_ends import lacked_so_far, noted_shortage, told_with_shortages
from heterodyne.api.model_source import ModelSource
from heterodyne.api.options import AnyOptimizer, LossOptions, PlanOptions, RunOptions
from heterodyne.api.preparation import prepare
from heterodyne.api.rank_worker import make_worker
from heterodyne.api.run_files import write_plan_files
from heterodyne.api.run_opening import open_run
from heterodyne.api.script_end import left_with_script
from heterodyne.api.session import Session, open_session
from heterodyne.arguments import checked_arguments
from heterodyne.around_model import unchanged_around
from heterodyne.cluster.profile import Profile
from heterodyne.frontend import trace
from heterodyne.graph.ir import ModelGraph
from heterodyne.plan.plan import Plan
from heterodyne.run_directory import RunDirectory
from heterodyne.runtime.records.recorder import Recorder
from heterodyne.runtime.records.shortages import Shortage
from heterodyne.tracker_options import tracker_options

__all__ = ["capture", "distribute", "measure_model"]


@checked_arguments
def capture(
    model: nn.Module,
    example_batch: BatchLike,
    *,
    loss: LossFunction | LossOptions | None = None,
    shared: Sequence[str] = (),
) -> ModelGraph:
    """Return what a model with its loss is: its ops, their sizes and FLOPs, its weights. Nothing is computed.

    Args:
        model: on any device, the meta device included.
        example_batch: the tensors of a batch, whose values do not matter.
        loss, shared: as in `distribute`.

    Raises CaptureError, with the line of the model and what to change.
    """
    if loss is None and isinstance(example_batch, Mapping | tuple | list):
        return trace(model, example_batch, shared=shared).graph
    source = ModelSource.of(model, example_batch, loss=loss, shared=shared, optimizer=None, plan="auto")
    return trace(source.module, source.example, name=type(source.model).__name__, shared=shared).graph


@checked_arguments
def distribute(
    model: nn.Module,
    example_batch: BatchLike,
    *,
    loss: LossFunction | LossOptions | None = None,
    shared: Sequence[str] = (),
    optimizer: AnyOptimizer | None = None,
    plan: PlanOptions | Plan | Path | str = "auto",
    global_batch_size: int | None = None,
    precision: Literal["fp32", "bf16", "fp16", "auto"] = "fp32",
    clip_grad_norm: float = 0.0,
    total_steps: int | None = None,
    seed: int = 0,
    compile: bool = False,
    session: Session | None = None,
    run: RunOptions | Path | str | None = None,
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
            ``loss(model(x), x)``. More is said by `LossOptions`.
        shared: entries of the batch that all samples share, such as ``("mask",)``: every device gets them whole. Those whose dim 0 is not
            of the batch size are known to be such. A tensor of a tuple goes by the name that forward gives it.
        optimizer: of torch.optim, made of the model's parameters: it becomes that of the rank, so the script's schedulers and hooks go
            on with it; or a function from parameters to an optimizer, which gets ``(name, parameter)`` pairs if its first argument is
            called ``named_parameters``. The planner takes both for an AdamW. Or a section as in a job file (AdamW with its defaults if
            None).
        plan: a strategy (``auto``, ``data``, ``pipeline``, ``split``, ``context``, ``equal``, ``fastest``; see a job's section
            ``parallelism``), a Plan, or the path of one. `PlanOptions` says how long a plan is searched for, and by what measurements.
        global_batch_size: samples of a step; None: those of the example.
        clip_grad_norm: by the true global norm; 0 for none.
        total_steps: how long a section's schedule of the learning rate is; None: the rate is constant after the warm-up.
        compile: stages and whole models run as code that torch.compile makes; see ``training.compile`` of a job.
        session: None: one is opened, and closed with the result.
        run: a new directory for metrics, plan, timelines and checkpoints, or `RunOptions`: how it is resumed, trackers, callbacks.

    Raises HeterodyneError for arguments that cannot be, DataError, CaptureError, VerifyError, MeasureError, InfeasibleError or PlanError.
    """
    kept = run if isinstance(run, RunOptions) else RunOptions(run)
    source = ModelSource.of(
        model, example_batch, loss=loss, shared=shared, optimizer=optimizer, plan=plan, total_steps=total_steps
    )
    closing = ExitStack()
    with ExitStack() as stack, _script_unchanged(source):
        here = stack.enter_context(open_session()) if session is None else session
        called = stack.enter_context(ExitStack())  # until the trainer is made, or an error leaves this function
        called.enter_context(here.calling("distribute()"))
        opened: RunDirectory | None = None
        shortages: tuple[Shortage, ...] = ()
        if kept.dir is not None:
            opened, disks = open_run(here, Path(kept.dir), resume=kept.resume)
            stack.enter_context(noted_shortage(here, opened))
            lacked = lacked_so_far(here, opened, disks)
            shortages = () if source.given is not None else lacked  # a plan that is given is obeyed
            here = replace(here, cluster=as_learned(here.cluster, shortages))
        captured = source.capture(here, precision=precision, global_batch_size=global_batch_size, compile=compile)
        with told_with_shortages(shortages):
            prepared = prepare(
                here,
                captured.captured,
                captured.whole,
                captured.settings,
                given=source.given,
                profile=source.options.profile,
            )
        recorder = Recorder(rank=here.rank, device=here.device)
        worker = make_worker(
            here,
            prepared,
            source.running,
            optimizer=captured.optimizer,
            total_steps=total_steps or 1,
            seed=seed,
            clip_grad_norm=clip_grad_norm,
            recorder=recorder,
            compile=compile,
        )
        if isinstance(source.optimizer, Optimizer):
            take_over(source.optimizer, worker.optimizer)
        if source.running is not source.module and not compile and not worker.runs_compiled:
            here.say(
                "the model is compiled, and its compiled code does not run: the plan runs pieces of its graph, or dropout or BatchNorm are "
                "replaced by ones that give what one device gives"
            )
        if opened is not None:
            directory = opened
            here.agreement.only_on_rank0(lambda: write_plan_files(directory, here, prepared))
        trainer = Distributed(
            model=source.model,
            format=source.format,
            session=here,
            prepared=prepared,
            worker=worker,
            recorder=recorder,
            run=opened,
            trackers=tracker_options(kept.trackers),
            callbacks=kept.callbacks,
            weights_at_end=kept.weights_at_end,
            closing=closing,
        )
        called.close()
        if kept.resume:
            trainer.load_checkpoint()
        closing.push(stack.pop_all())
        closing.enter_context(left_with_script(trainer._leave_with_script))
        closing.enter_context(here.held_open(trainer.__exit__))
        return trainer


@checked_arguments
def measure_model(
    model: nn.Module,
    example_batch: BatchLike,
    *,
    loss: LossFunction | LossOptions | None = None,
    shared: Sequence[str] = (),
    optimizer: AnyOptimizer | None = None,
    plan: PlanOptions | str = "auto",
    global_batch_size: int | None = None,
    precision: Literal["fp32", "bf16", "fp16", "auto"] = "fp32",
    compile: bool = False,
    session: Session | None = None,
) -> Profile:
    """Measure a model on the devices of the session, and return what `find_plan` and `simulate_plan` calculate with. Every rank calls it.

    Args:
        session: None: one is opened for it.

    The others are those of `distribute`. Of ``plan`` what it says of measuring counts.

    Raises HeterodyneError for arguments that cannot be, DataError, CaptureError or MeasureError.
    """
    source = ModelSource.of(model, example_batch, loss=loss, shared=shared, optimizer=optimizer, plan=plan)
    with ExitStack() as stack, _script_unchanged(source):
        here = stack.enter_context(open_session()) if session is None else session
        stack.enter_context(here.calling("measure_model()"))
        captured = source.capture(here, precision=precision, global_batch_size=global_batch_size, compile=compile)
        return measure_everywhere(here, captured.captured, captured.whole, captured.settings)


@contextmanager
def _script_unchanged(source: ModelSource) -> Iterator[None]:
    """Leave the random numbers that the script draws later, in what order it shuffles its data, as they would be without this; and what
    its hooks write, which copies of the model call too.
    """
    with torch.random.fork_rng(devices=[]), unchanged_around(source.model):
        yield

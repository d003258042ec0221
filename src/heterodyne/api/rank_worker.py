"""The worker of a rank, from what was prepared; with weights that are read where they are stored."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable

from torch import Tensor, nn

from heterodyne.api.compiled import uncompiled
from heterodyne.api.session import Session
from heterodyne.api.settings import Prepared
from heterodyne.api.stage_cutting import StageCutter, again_of
from heterodyne.cluster.profile import Profile
from heterodyne.cost.model import CostModel
from heterodyne.cost.recipe import Recipe
from heterodyne.frontend import Captured
from heterodyne.job import OptimizerSection
from heterodyne.plan.lower import Lowered
from heterodyne.runtime.records.recorder import Recorder
from heterodyne.runtime.worker import OptimizerFactory, Worker
from heterodyne.sim.run import simulate
from heterodyne.stored_weights import StoredWeights

__all__ = ["make_worker", "stored_everywhere"]


def stored_everywhere(
    session: Session, find: Callable[[], tuple[nn.Module, StoredWeights] | None]
) -> tuple[nn.Module, StoredWeights] | None:
    """A model without weights and where they are read, if every rank finds them. Collective."""
    found = session.with_files(find)
    there = all(session.communicator.all_gather_object(found is not None))
    return found if there else None


def make_worker(
    session: Session,
    prepared: Prepared,
    model: nn.Module,
    *,
    optimizer: OptimizerSection | OptimizerFactory,
    total_steps: int,
    seed: int,
    first_sample: int = 0,
    clip_grad_norm: float,
    recorder: Recorder | None = None,
    compile: bool = False,
    stored: StoredWeights | None = None,
    weights: Iterable[tuple[str, Tensor]] | None = None,
) -> Worker:
    """The worker of this rank, obeying what was prepared. Collective; see `Worker`. ``model`` may be compiled; with ``compile`` stages
    and whole models are.
    """
    captured, module = prepared.captured, uncompiled(model)
    if compile and module is model:
        model = copy.copy(module)
        model.compile()
    worker = Worker(
        module,
        lowered=prepared.lowered,
        communicator=session.communicator,
        loss_count=captured.loss_count,
        optimizer=optimizer,
        total_steps=total_steps,
        seed=seed,
        first_sample=first_sample,
        clip_grad_norm=clip_grad_norm,
        host_activation_bytes=_host_activation_bytes(prepared.lowered, prepared.profile)[session.rank],
        recorder=recorder,
        watch=session.watchdog,
        stage_programs=StageCutter(captured, module) if isinstance(captured, Captured) else None,
        again=again_of(captured, module),
        left=captured.left,
        compiled=None if module is model else model,
        compile_stages=compile,
        stored=stored,
        weights=weights,
        say=session.say,
    )
    session.give_back()  # the weights that the plan has elsewhere
    if compile:
        apart = [
            rank for rank, does in enumerate(session.communicator.all_gather_object(worker.runs_compiled)) if not does
        ]
        if apart:
            session.say(
                f"not compiled on {'rank' if len(apart) == 1 else 'ranks'} {', '.join(map(str, apart))}: dropout and BatchNorm that give "
                "what one device gives, sharded stages, and backwards in halves run as they are"
            )
    return worker


def _host_activation_bytes(lowered: Lowered, profile: Profile) -> tuple[int, ...]:
    """The most of each rank. Raises MeasureError for a profile that lacks what copies to the host take."""
    plan, cluster = lowered.plan, lowered.cluster
    if not any(stage.offload_activations for pipeline in plan.pipelines for stage in pipeline.stages):
        return (0,) * len(cluster.devices)
    costs = CostModel(graph=lowered.graph, cluster=cluster, profile=profile, recipe=Recipe(precision=plan.precision))
    return simulate(lowered.program, costs.of(plan, lowered.weights)).host_bytes

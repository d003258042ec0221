"""Where the wings are wired: what capture, measure, search and runtime need of each other is handed over here, and nowhere else.

session      one rank among the others: the communicator, the cluster, the device
preparation  graph -> profile -> plan -> program, the same on every rank (`capturing`, `measuring`, `rank_worker` are its parts)
distribute   for one's own training loop; `options` says the loss, the plan and the run closer, `model_source` is the model at the door
measure_model, find_plan, simulate_plan   the steps on the way, each by itself; the last two without devices (`offline`)
batches      datasets and streams for it, of which each rank reads its own samples
train, verify, measure, plan, simulate   for job files: the verbs of the command line
study        how a job scales, from many plans or many runs
on_paper     plans for devices that are not here; without torch, as long as the model has not to be captured
workers      starts one process a device where nobody else did

Names are loaded when they are first used, so that planning on paper does not load torch.
"""

from __future__ import annotations

import gc
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from heterodyne.api.again import Training, train_here
    from heterodyne.api.distributed import Distributed
    from heterodyne.api.distributing import capture, distribute, measure_model
    from heterodyne.api.global_batches import Batches, batches
    from heterodyne.api.loop.callbacks import Callback
    from heterodyne.api.measure import measure_job
    from heterodyne.api.offline import find_plan, simulate_plan
    from heterodyne.api.options import LossOptions, PlanOptions, RunOptions
    from heterodyne.api.plan import plan_job
    from heterodyne.api.session import Session, open_session
    from heterodyne.api.simulate import Simulated, simulate_job
    from heterodyne.api.study import StudyWishes, study_job
    from heterodyne.api.train import train_job
    from heterodyne.api.verify import verify_job
    from heterodyne.api.workers import on_every_device
    from heterodyne.runtime.records.trackers.trackers import Trackers

_HOMES = {
    "Batches": "heterodyne.api.global_batches",
    "Callback": "heterodyne.api.loop.callbacks",
    "Distributed": "heterodyne.api.distributed",
    "LossOptions": "heterodyne.api.options",
    "PlanOptions": "heterodyne.api.options",
    "RunOptions": "heterodyne.api.options",
    "Session": "heterodyne.api.session",
    "Simulated": "heterodyne.api.simulate",
    "StudyWishes": "heterodyne.api.study",
    "Training": "heterodyne.api.again",
    "Trackers": "heterodyne.runtime.records.trackers.trackers",
    "batches": "heterodyne.api.global_batches",
    "capture": "heterodyne.api.distributing",
    "distribute": "heterodyne.api.distributing",
    "find_plan": "heterodyne.api.offline",
    "measure_job": "heterodyne.api.measure",
    "measure_model": "heterodyne.api.distributing",
    "on_every_device": "heterodyne.api.workers",
    "open_session": "heterodyne.api.session",
    "plan_job": "heterodyne.api.plan",
    "simulate_job": "heterodyne.api.simulate",
    "simulate_plan": "heterodyne.api.offline",
    "study_job": "heterodyne.api.study",
    "train_here": "heterodyne.api.again",
    "train_job": "heterodyne.api.train",
    "verify_job": "heterodyne.api.verify",
}

__all__ = [
    "Batches",
    "Callback",
    "Distributed",
    "LossOptions",
    "PlanOptions",
    "RunOptions",
    "Session",
    "Simulated",
    "StudyWishes",
    "Trackers",
    "Training",
    "batches",
    "capture",
    "distribute",
    "find_plan",
    "measure_job",
    "measure_model",
    "on_every_device",
    "open_session",
    "plan_job",
    "simulate_job",
    "simulate_plan",
    "study_job",
    "train_here",
    "train_job",
    "verify_job",
]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    collects = gc.isenabled()
    gc.disable()  # modules are no garbage, and torch alone makes enough objects to have them searched for it many times
    try:
        return getattr(import_module(_HOMES[name]), name)
    finally:
        if collects:
            gc.enable()

"""Train one PyTorch model on accelerators of different power: fast, exact, with no rewrite of the model.

    import heterodyne as hd

    graph = hd.capture(model, example_batch)             # what the model is
    profile = hd.measure_model(model, example_batch)     # what its parts take on each device
    plan = hd.find_plan(graph, cluster, profile, global_batch_size=32)
    timeline = hd.simulate_plan(plan, graph, cluster, profile)
    trainer = hd.distribute(model, example_batch)        # all of it, and ready to train; one call a rank
    for batch in batches:                                # the global batch, the same on every rank
        result = trainer.step(batch)

Names are loaded when they are first used, so that planning alone never loads torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from heterodyne.annotate import replicate, set_default_strategy, split
    from heterodyne.api import (
        Batches,
        Callback,
        Distributed,
        LossOptions,
        PlanOptions,
        RunOptions,
        Trackers,
        batches,
        capture,
        distribute,
        find_plan,
        measure_model,
        open_session,
        simulate_plan,
    )
    from heterodyne.cluster import Cluster, Profile
    from heterodyne.drop_in import (
        DistributedDataParallel,
        DistributedSampler,
        ZeroRedundancyOptimizer,
        prepare_loader,
    )
    from heterodyne.errors import HeterodyneError
    from heterodyne.graph import ModelGraph
    from heterodyne.job import Job, OptimizerSection
    from heterodyne.plan import Plan
    from heterodyne.timeline import Timeline

__version__ = "0.1.0"

_HOMES = {
    "Batches": "heterodyne.api",
    "Callback": "heterodyne.api",
    "Cluster": "heterodyne.cluster",
    "Distributed": "heterodyne.api",
    "DistributedDataParallel": "heterodyne.drop_in",
    "DistributedSampler": "heterodyne.drop_in",
    "HeterodyneError": "heterodyne.errors",
    "Job": "heterodyne.job",
    "LossOptions": "heterodyne.api",
    "ModelGraph": "heterodyne.graph",
    "OptimizerSection": "heterodyne.job",
    "Plan": "heterodyne.plan",
    "PlanOptions": "heterodyne.api",
    "Profile": "heterodyne.cluster",
    "RunOptions": "heterodyne.api",
    "Timeline": "heterodyne.timeline",
    "Trackers": "heterodyne.api",
    "ZeroRedundancyOptimizer": "heterodyne.drop_in",
    "batches": "heterodyne.api",
    "capture": "heterodyne.api",
    "distribute": "heterodyne.api",
    "find_plan": "heterodyne.api",
    "measure_model": "heterodyne.api",
    "open_session": "heterodyne.api",
    "prepare_loader": "heterodyne.drop_in",
    "replicate": "heterodyne.annotate",
    "set_default_strategy": "heterodyne.annotate",
    "simulate_plan": "heterodyne.api",
    "split": "heterodyne.annotate",
}

__all__ = [
    "Batches",
    "Callback",
    "Cluster",
    "Distributed",
    "DistributedDataParallel",
    "DistributedSampler",
    "HeterodyneError",
    "Job",
    "LossOptions",
    "ModelGraph",
    "OptimizerSection",
    "Plan",
    "PlanOptions",
    "Profile",
    "RunOptions",
    "Timeline",
    "Trackers",
    "ZeroRedundancyOptimizer",
    "__version__",
    "batches",
    "capture",
    "distribute",
    "find_plan",
    "measure_model",
    "open_session",
    "prepare_loader",
    "replicate",
    "set_default_strategy",
    "simulate_plan",
    "split",
]


def __getattr__(name: str) -> object:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'heterodyne' has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(import_module(home), name)


def __dir__() -> list[str]:
    return list(__all__)

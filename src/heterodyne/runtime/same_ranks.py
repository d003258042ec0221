"""Whether the workers that were started are those that a program is for."""

from __future__ import annotations

from torch import nn

from heterodyne.cluster.spec import Cluster
from heterodyne.errors import PlanError, WorkerError
from heterodyne.plan.program import Program
from heterodyne.runtime.comm.communicator import Communicator

__all__ = ["require_together"]


def require_together(
    module: nn.Module, program: Program, cluster: Cluster, communicator: Communicator, *, given: bool
) -> None:
    """Raises PlanError or WorkerError if they are not. ``given``: weights come from elsewhere than the module of rank 0."""
    if len(cluster.devices) != communicator.world_size or len(program.ranks) != communicator.world_size:
        raise PlanError(
            f"the cluster has {len(cluster.devices)} devices and the program {len(program.ranks)} ranks, but "
            f"{communicator.world_size} workers were started: start one worker a device"
        )
    backend = cluster.devices[communicator.rank].backend
    if backend != communicator.device.type:
        raise WorkerError(
            f"rank {communicator.rank} runs on {communicator.device}, the cluster's device there is a {backend}: "
            "start the workers in the order of the cluster's devices",
            rank=communicator.rank,
        )
    if communicator.rank == 0 and not given and any(p.is_meta for p in module.parameters()):
        raise WorkerError("rank 0 has a model without weights (meta device): build it with its weights there", rank=0)

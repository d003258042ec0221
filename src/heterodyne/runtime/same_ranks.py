"""Whether the workers that were started are those that a program is for."""

from __future__ import annotations

import socket
import sys

from torch import nn

from heterodyne.code_read import digest_of_code
from heterodyne.errors import PlanError, WorkerError
from heterodyne.plan.lower import Lowered
from heterodyne.runtime.comm.communicator import Communicator

__all__ = ["require_same_code", "require_together"]


def require_same_code(communicator: Communicator, own: str, what: str) -> None:
    """Raise WorkerError, on every rank, if ``own`` is not the same on all ranks of one version of Python. Collective."""
    if communicator.world_size == 1:
        return
    of_ranks = communicator.all_gather_object((sys.version_info[:2], own, socket.gethostname()))
    version, first, host = of_ranks[0]
    others = [r for r, (of, found, _) in enumerate(of_ranks) if of == version and found != first]
    if others:
        _, other, there = of_ranks[others[0]]
        raise WorkerError(
            f"{what} is another on {'rank' if len(others) == 1 else 'ranks'} {', '.join(map(str, others[:8]))} (host {there}: "
            f"{other[:12]}) than on rank 0 (host {host}: {first[:12]}): bring all hosts to one state, or ranks would train different "
            "models",
            rank=others[0],
        )


def require_together(module: nn.Module, lowered: Lowered, communicator: Communicator, *, given: bool) -> None:
    """Raises PlanError or WorkerError if they are not. ``given``: weights come from elsewhere than the module of rank 0."""
    devices = lowered.cluster.devices
    if len(devices) != communicator.world_size:
        raise PlanError(
            f"the cluster has {len(devices)} devices, but {communicator.world_size} workers were started: start one worker a device"
        )
    backend = devices[communicator.rank].backend
    if backend != communicator.device.type:
        raise WorkerError(
            f"rank {communicator.rank} runs on {communicator.device}, the cluster's device there is a {backend}: "
            "start the workers in the order of the cluster's devices",
            rank=communicator.rank,
        )
    require_same_code(communicator, digest_of_code(module), f"the code of the model {type(module).__name__}")
    if communicator.rank == 0 and not given and any(p.is_meta for p in module.parameters()):
        raise WorkerError("rank 0 has a model without weights (meta device): build it with its weights there", rank=0)

"""Whether the workers that were started are those that a program is for."""

from __future__ import annotations

import hashlib
import socket
import sys
from functools import cache
from pathlib import Path

import torch
from torch import nn

import heterodyne
from heterodyne.code_read import digest_of_code
from heterodyne.errors import PlanError, WorkerError
from heterodyne.plan.lower import Lowered
from heterodyne.runtime.comm.communicator import Communicator

__all__ = ["require_same_code", "require_same_software", "require_together"]


def require_same_software(communicator: Communicator) -> None:
    """Raise WorkerError, on every rank, if ranks run other versions of torch or another state of this package. Collective."""
    require_same_code(communicator, f"torch {torch.__version__}", "torch")
    require_same_code(communicator, digest_of_package(), f"heterodyne {heterodyne.__version__} (its files)")


@cache
def digest_of_package() -> str:
    """Return a hash of the files of this package."""
    found = hashlib.blake2b(digest_size=16)
    root = Path(heterodyne.__file__).parent
    for path in sorted(root.rglob("*.py")):
        found.update(f"{path.relative_to(root)}\0".encode() + path.read_bytes())
    return found.hexdigest()


def require_same_code(communicator: Communicator, own: str, what: str) -> None:
    """Raise WorkerError, on every rank, if ``own`` is not the same on all ranks of one version of Python. Collective."""
    if communicator.world_size == 1:
        return
    of_ranks = communicator.all_gather_object((sys.version_info[:2], own, socket.gethostname()))
    version, first, host = of_ranks[0]
    others = [r for r, (of, found, _) in enumerate(of_ranks) if of == version and found != first]
    if others:
        raise WorkerError(
            f"{what} is another on {'rank' if len(others) == 1 else 'ranks'} {', '.join(map(str, others[:8]))} (host "
            f"{of_ranks[others[0]][2]}) than on rank 0 (host {host}): bring all hosts to one state, or ranks would train different models",
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

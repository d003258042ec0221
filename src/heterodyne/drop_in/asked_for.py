"""What a script asks of DDP, and what its process group must have, looked at before anything is made."""

from __future__ import annotations

import inspect
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from heterodyne.errors import HeterodyneError
from heterodyne.runtime.comm.communicator import Communicator

__all__ = ["communicator_for", "honoured"]

_REFUSED = {  # arguments of PyTorch's, and why
    "mixed_precision": "it reduces gradients by a communication hook of its own: use torch.autocast, or a model in 16 bits",
    "delay_all_reduce_named_params": "these parameters are averaged as if all ranks had as many samples",
    "param_to_hook_all_reduce": "these parameters are averaged as if all ranks had as many samples",
    "device_mesh": "it may have other dimensions than the batch: leave it out, the default process group is used",
}


def honoured(module: nn.Module, arguments: tuple[Any, ...], options: dict[str, Any]) -> inspect.BoundArguments:
    """The arguments by name. Raises HeterodyneError with all that PyTorch would take and this cannot."""
    if not (dist.is_available() and dist.is_initialized()):
        raise HeterodyneError(
            "there is no process group: call torch.distributed.init_process_group() first, as for PyTorch's DDP, in a script that torchrun "
            "starts"
        )
    bound = inspect.signature(nn.parallel.DistributedDataParallel).bind(module, *arguments, **options)
    given = bound.arguments
    wrong = [f"{name}: {why}" for name, why in _REFUSED.items() if given.get(name) is not None]
    group = given.get("process_group")
    if group is not None and dist.get_world_size(group) != dist.get_world_size():
        wrong.append("process_group: it leaves out some ranks; pass one of all ranks, or none")
    if isinstance(module, nn.parallel.DistributedDataParallel):
        wrong.append("module: it is a DistributedDataParallel already; pass its .module")
    device = next((p.device for p in module.parameters() if p.requires_grad), None)
    if device is not None and _backend(group, device) is None:
        wrong.append(
            f"module: it is on {device}, for which the process group has no backend ({dist.get_backend(group)}); move it to this rank's "
            "device first"
        )
    if wrong:
        raise HeterodyneError("\n  ".join(["DistributedDataParallel cannot take these arguments:", *wrong]))
    return bound


def _backend(group: dist.ProcessGroup | None, device: torch.device) -> str | None:
    """The name of the backend that carries tensors of a device; None: there is none."""
    try:
        return str((group or dist.distributed_c10d._get_default_group())._get_backend(device).name())
    except RuntimeError:
        return None


def _require_one_backend(communicator: Communicator, group: dist.ProcessGroup | None) -> None:
    """Raises HeterodyneError on every rank. Collective."""
    device = communicator.device
    found = communicator.all_gather_object((device.type, _backend(group, device)))
    if len({backend for _, backend in found}) > 1:
        ranks = ", ".join(f"rank {rank} has {kind} ({backend})" for rank, (kind, backend) in enumerate(found))
        raise HeterodyneError(
            f"the ranks' devices have no backend in common: {ranks}. Call init_process_group('gloo'), which joins cuda and cpu; for others "
            "use hd.distribute"
        )


def communicator_for(module: nn.Module, group: dist.ProcessGroup | None = None) -> Communicator:
    """Joins the ranks that have copies of ``module``. Collective. Raises HeterodyneError, on all, if no backend joins their devices."""
    device = next((p.device for p in module.parameters() if p.requires_grad), torch.device("cpu"))
    communicator = Communicator(rank=dist.get_rank(), world_size=dist.get_world_size(), device=device)
    _require_one_backend(communicator, group)
    return communicator

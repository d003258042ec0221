"""A module on its device, with the same weights on every rank."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from heterodyne.errors import WorkerError
from heterodyne.runtime.meeting.communicator import Communicator

__all__ = ["equalise", "materialise", "stored_tensors"]


def materialise(module: nn.Module, device: torch.device) -> None:
    """Move what is there to the device and make room for what is only described (meta device), in place. Ties are kept."""
    made: dict[int, Tensor] = {}
    for part in module.modules():
        for name, tensor in [*part.named_parameters(recurse=False), *part.named_buffers(recurse=False)]:
            if tensor.is_meta:
                setattr(part, name, made.setdefault(id(tensor), _empty(tensor, device)))
    module.to(device)


def stored_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Every parameter and buffer once, also those that a state dict leaves out."""
    yield from module.named_parameters()
    yield from module.named_buffers()


def equalise(module: nn.Module, communicator: Communicator, source: int) -> None:
    """Give every rank the parameters and buffers of rank ``source``. Collective. Raises WorkerError if the models differ."""
    described = [(name, tuple(t.shape), str(t.dtype)) for name, t in stored_tensors(module)]
    for rank, other in enumerate(communicator.all_gather_object(described)):
        if other != described:
            different = [a[0] for a, b in zip(described, other, strict=False) if a != b] or ["the number of tensors"]
            raise WorkerError(
                f"rank {rank} has built another model than rank {communicator.rank} (they differ in {different[0]!r}): "
                "every worker must build the same one",
                rank=rank,
            )
    for _, tensor in stored_tensors(module):
        communicator.control.broadcast(tensor.data, source)


def _empty(tensor: Tensor, device: torch.device) -> Tensor:
    empty = torch.empty_like(tensor, device=device)
    return nn.Parameter(empty, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty

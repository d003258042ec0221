"""A module on its device, with the same weights on every rank that holds them, and nothing of what it does not hold."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from heterodyne.errors import WorkerError
from heterodyne.plan.boxes import Box
from heterodyne.runtime.comm.communicator import Communicator
from heterodyne.runtime.weights.boxed import boxed

__all__ = ["Stored", "fill_in", "place_weights", "stored_tensors"]


class Stored(Protocol):
    """Parameters in files."""

    def __contains__(self, name: object) -> bool: ...

    def read(self, name: str, box: Sequence[tuple[int, int, int]], dtype: torch.dtype) -> Tensor:
        """A parameter, or of it the box of ``(dim, first, stop)``."""


def stored_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Every parameter and buffer once, also those that a state dict leaves out."""
    yield from module.named_parameters()
    yield from module.named_buffers()


def place_weights(
    module: nn.Module,
    communicator: Communicator,
    holds: Callable[[str], bool],
    box: Callable[[str], Box],
    *,
    source: int = 0,
    stored: Stored | None = None,
) -> None:
    """Give every rank those parameters and buffers of rank ``source`` that it holds, or their boxes, on its device; the others go.

    What is ``stored`` each rank reads for itself, and of it only what it holds; rank ``source`` needs no values of it.

    What is not held is left on the meta device, where it takes no memory. Ties are kept. One tensor is on its way at a time.
    Collective. Raises WorkerError if the ranks have built different models.
    """
    _require_alike(module, communicator)
    placed: dict[int, Tensor] = {}
    for name, tensor in list(stored_tensors(module)):
        if stored is not None and name in stored:
            cuts = [(cut.dim, cut.first, cut.stop) for cut in box(name)]
            own = stored.read(name, cuts, tensor.dtype).to(communicator.device) if holds(name) else None
            placed[id(tensor)] = _placed(tensor, own)
            continue
        if communicator.rank == source:
            sent = tensor.data
        else:
            here = holds(name) and not box(name)
            sent = torch.empty_like(tensor, device=communicator.device if here else "cpu", requires_grad=False)
        communicator.control.broadcast(sent, source)
        placed[id(tensor)] = _placed(tensor, _own(sent, box(name)).to(communicator.device) if holds(name) else None)
    for part in module.modules():
        for table in (part._parameters, part._buffers):
            for name, entry in table.items():
                if entry is not None:
                    table[name] = placed[id(entry)]  # type: ignore[assignment]  # of the same kind as it was


def fill_in(module: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Give a module of which only a part is held here all its parameters and buffers, on the host. Ties are kept."""
    filled = {id(tensor): _placed(tensor, tensors[name].cpu()) for name, tensor in list(stored_tensors(module))}
    for part in module.modules():
        for table in (part._parameters, part._buffers):
            for name, entry in table.items():
                if entry is not None:
                    table[name] = filled[id(entry)]  # type: ignore[assignment]  # of the same kind as it was


def _own(tensor: Tensor, box: Box) -> Tensor:
    """A box of its own memory; all of a tensor as it is."""
    return boxed(tensor, box).clone() if box else tensor


def _placed(tensor: Tensor, value: Tensor | None) -> Tensor:
    """The tensor with that value, itself if it can be, since the user may hold on to it; without one on the meta device."""
    if value is not None and not tensor.is_meta:
        if torch._has_compatible_shallow_copy_type(tensor, value):
            tensor.data = value
        else:  # kinds of devices that come with a package of their own
            torch.utils.swap_tensors(tensor, _like(tensor, value))  # type: ignore[no-untyped-call]
        return tensor
    return _like(tensor, torch.empty_like(tensor, device="meta") if value is None else value)


def _like(tensor: Tensor, value: Tensor) -> Tensor:
    """The value as a parameter, if the tensor is one."""
    return nn.Parameter(value, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else value


def _require_alike(module: nn.Module, communicator: Communicator) -> None:
    described = [(name, tuple(t.shape), str(t.dtype)) for name, t in stored_tensors(module)]
    for rank, other in enumerate(communicator.all_gather_object(described)):
        if other != described:
            different = [a[0] for a, b in zip(described, other, strict=False) if a != b] or ["the number of tensors"]
            raise WorkerError(
                f"rank {rank} has built another model than rank {communicator.rank} (they differ in {different[0]!r}): "
                "every worker must build the same one",
                rank=rank,
            )

"""Parameters that are in the memory of others: on one device an update of one is an update of both, and no plan keeps that."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import takewhile

import torch
from torch import Tensor, nn

from heterodyne.around_model import functions_of, kept_by
from heterodyne.errors import CaptureError

__all__ = ["require_own_memory"]


def require_own_memory(model: nn.Module) -> None:
    """Raise CaptureError, with both names, for a trained parameter that shares elements with another parameter, a buffer, or a tensor that
    the model has as an attribute, in a container or around its functions.

    Views of one memory that have no element in common are good, as are tied names of one parameter.
    """
    for (name, tensor), (other, second) in _together(model):
        trained = tensor if tensor.requires_grad else second
        if trained.requires_grad and _overlap(tensor, second):
            what = "parameters" if isinstance(tensor, nn.Parameter) and isinstance(second, nn.Parameter) else "tensors"
            raise CaptureError(
                f"{name!r} and {other!r} of {type(model).__name__} are two {what} in the same memory, so that on one device an update of "
                "one is an update of the other; devices that hold one of them would not know. To tie two parameters make them one object "
                f"(second.weight = first.weight, in place of second.weight.data = first.weight.data), else give {other!r} a copy: .clone()"
            )


def _together(model: nn.Module) -> Iterator[tuple[tuple[str, Tensor], tuple[str, Tensor]]]:
    """Yield pairs of parameters, buffers and other tensors of the model in one storage, whose ranges of bytes overlap."""
    registered = [*model.named_parameters(), *model.named_buffers()]
    known = {id(tensor) for _, tensor in registered}
    others = {
        id(kept.value): (kept.name, kept.value)
        for kept in kept_by(model, functions_of(model))
        if isinstance(kept.value, Tensor) and id(kept.value) not in known
    }
    by_storage: dict[tuple[torch.device, int], list[tuple[str, Tensor]]] = {}
    for name, tensor in (*registered, *others.values()):
        if tensor.layout == torch.strided and tensor.device.type != "meta" and tensor.numel():
            start = tensor.untyped_storage().data_ptr()
            if start:
                by_storage.setdefault((tensor.device, start), []).append((name, tensor))
    for members in by_storage.values():
        members.sort(key=lambda entry: _bytes(entry[1]))
        for number, entry in enumerate(members):
            stop = _bytes(entry[1])[1]
            behind = takewhile(lambda other: _bytes(other[1])[0] < stop, members[number + 1 :])  # noqa: B023  # used at once
            yield from ((entry, other) for other in behind)


def _overlap(a: Tensor, b: Tensor) -> bool:
    """Return whether tensors in one storage, whose ranges of bytes overlap, have an element in common."""
    if (a.is_contiguous() and b.is_contiguous()) or a.itemsize != b.itemsize:
        return True
    return bool(torch.isin(_places(a), _places(b)).any())


def _bytes(tensor: Tensor) -> tuple[int, int]:
    """From its first byte to behind its last one."""
    first = int(tensor.storage_offset()) * tensor.itemsize
    reach = sum((int(size) - 1) * int(stride) for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return first, first + (reach + 1) * tensor.itemsize


def _places(tensor: Tensor) -> Tensor:
    """Return the place of each element in the storage."""
    found = torch.tensor([tensor.storage_offset()])
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        found = (found[:, None] + torch.arange(size) * stride).flatten()
    return found

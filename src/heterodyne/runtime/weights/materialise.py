"""A module on its device, with the same weights on every rank that holds them, and nothing of what it does not hold."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.func import functional_call

from heterodyne.errors import WorkerError
from heterodyne.plan.boxes import Box, numel
from heterodyne.runtime.comm.communicator import Communicator
from heterodyne.runtime.weights.boxed import boxed
from heterodyne.stored_weights import StoredWeights

__all__ = ["called_with", "exchanged", "fill_in", "place_weights", "replace_held", "stored_tensors"]


def stored_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Every parameter and buffer once, also those that a state dict leaves out."""
    yield from module.named_parameters()
    yield from module.named_buffers()


def called_with(
    module: nn.Module, weights: Mapping[str, Tensor], args: tuple[Any, ...], kwargs: Mapping[str, Any] | None = None
) -> Any:
    """Call a module with other values in the place of its parameters and buffers, by any of their names; return its outputs.

    `torch.func.functional_call` swaps a value in once for each name. A module that is registered under two names is swapped twice, and
    keeps the first replacement in the end; here each parameter of it is named once.
    """
    named = chain(module.named_parameters(remove_duplicate=False), module.named_buffers(remove_duplicate=False))
    given = {id(own): weights[name] for name, own in named if name in weights}
    placed = {
        f"{path}.{name}" if path else name: given[id(own)]
        for path, part in module.named_modules()
        for name, own in chain(part._parameters.items(), part._buffers.items())
        if id(own) in given
    }
    return functional_call(module, placed, args, dict(kwargs or {}), tie_weights=False)


def place_weights(
    module: nn.Module,
    communicator: Communicator,
    holders: Callable[[str], Mapping[int, Box]],
    *,
    source: int = 0,
    stored: StoredWeights | None = None,
    values: Iterable[tuple[str, Tensor]] | None = None,
    keep: Callable[[str, Tensor], Tensor] = lambda _, own: own,
) -> None:
    """Give every rank those parameters and buffers of rank ``source`` that it holds, or their boxes, on its device; the others go.

    What is not held is left on the meta device, where it takes no memory. Ties are kept. One tensor is on its way at a time, whole only
    on ``source`` and on ranks that hold it whole, and what ``source`` does not hold it lets go of at once.

    Args:
        holders: of a tensor, the box of each rank that holds some of it.
        stored: what each rank reads for itself, and of it only what it holds; ``source`` needs no values of it.
        values: on ``source`` all other tensors by name, in any order, if its module has none; each is let go of before the next
            is asked for.
        keep: of what this rank holds of a tensor, what it is to have.

    Collective. Raises WorkerError if the ranks have built different models, or a value has not the shape and dtype of its tensor.
    """
    _require_alike(module, communicator)
    places = _places(module)
    for name in [name for name in places if stored is not None and name in stored]:
        tables = places.pop(name)
        tensor, of = _at(tables), holders(name)
        assert stored is not None
        own = None
        if communicator.rank in of:
            cuts = [(cut.dim, cut.first, cut.stop) for cut in of[communicator.rank]]
            own = stored.read(name, cuts, tensor.dtype).to(communicator.device)
        _put(tables, _placed(tensor, None if own is None else keep(name, own)))
    for name, value in _in_turn(places, communicator, source, values):
        tables = places.pop(name)
        tensor = _at(tables)
        own = _sent(tensor, value, holders(name), communicator, source)
        placed = _placed(tensor, None if own is None else keep(name, own))
        del tensor, value, own
        _put(tables, placed)


def replace_held(module: nn.Module, name: str, value: Tensor, box: Box | None, device: torch.device) -> Tensor:
    """Put what this rank holds of a stored tensor in its place, whose ``value`` is now another one. Return it.

    Args:
        box: that this rank holds; (): all of it; None: nothing.
    """
    held = torch.empty_like(value, device="meta") if box is None else _own(value, box).to(device)
    _put(_places(module)[name], held)
    return held


_Table: TypeAlias = dict[str, Tensor | None]


def _at(tables: Sequence[tuple[_Table, str]]) -> Tensor:
    table, entry = tables[0]
    tensor = table[entry]
    assert tensor is not None
    return tensor


def _put(tables: Iterable[tuple[_Table, str]], placed: Tensor) -> None:
    for table, entry in tables:
        table[entry] = placed


def _places(module: nn.Module) -> dict[str, list[tuple[_Table, str]]]:
    """Where each stored tensor stands in the module, which may be several places if it is tied."""
    names = {id(tensor): name for name, tensor in stored_tensors(module)}
    found: dict[str, list[tuple[_Table, str]]] = {name: [] for name in names.values()}
    for part in module.modules():
        for table in (part._parameters, part._buffers):
            for entry, tensor in table.items():
                if tensor is not None:
                    found[names[id(tensor)]].append((table, entry))  # type: ignore[arg-type]  # a parameter is a tensor
    return found


def _in_turn(
    places: Mapping[str, Sequence[tuple[_Table, str]]],
    communicator: Communicator,
    source: int,
    values: Iterable[tuple[str, Tensor]] | None,
) -> Iterator[tuple[str, Tensor | None]]:
    """All names, in one order on all ranks, with the values on ``source``. Collective."""
    here = communicator.rank == source
    if not communicator.broadcast_object(values is not None, source):
        for name in list(places):
            yield name, _at(places[name]).data if here else None
        return
    missing, coming = len(places), iter(values or ())
    for _ in range(missing):
        name, value = next(coming, ("", None)) if here else ("", None)
        name = communicator.broadcast_object(name, source)
        if name not in places:
            raise WorkerError(f"the weights of the model end before all are there ({name!r} instead)", rank=source)
        if here and (value is None or value.shape != _at(places[name]).shape or value.dtype != _at(places[name]).dtype):
            raise WorkerError(f"the value of {name!r} has not the shape and dtype that the model has", rank=source)
        yield name, value
        del value


def _sent(
    tensor: Tensor, value: Tensor | None, holders: Mapping[int, Box], communicator: Communicator, source: int
) -> Tensor | None:
    """What this rank holds of a tensor, on its device; None: nothing. ``value``: all of it, on ``source``. Collective."""
    rank, device = communicator.rank, communicator.device
    if len(holders) == communicator.world_size and not any(holders.values()):
        sent = torch.empty_like(tensor, device=device, requires_grad=False) if value is None else value
        communicator.control.broadcast(sent, source)
        return sent.to(device)
    if value is not None:
        for other, box in holders.items():
            if other != source and numel(box, value.shape):
                communicator.send(boxed(value, box).cpu().contiguous(), other)
        return _own(value, holders[rank]).to(device) if rank in holders else None
    if rank not in holders:
        return None
    part = boxed(tensor.detach(), holders[rank])
    received = torch.empty(part.shape, dtype=part.dtype)
    if received.numel():
        communicator.receive(received, source)
    if not holders[rank] and not tensor.is_contiguous():
        return torch.empty_like(tensor, device=device, requires_grad=False).copy_(received)
    return received.to(device)


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
    """Return the tensor with that value, or on the meta device if it has none here: the same object, since the user may hold on to it."""
    if value is not None and torch._has_compatible_shallow_copy_type(tensor, value):
        tensor.data = value
        return tensor
    return exchanged(tensor, torch.empty_like(tensor, device="meta") if value is None else value)


def exchanged(tensor: Tensor, value: Tensor) -> Tensor:
    """Return the tensor with that value of any device, and its old one in a graph that it is part of; another object if torch refuses."""
    other = nn.Parameter(value, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else value
    try:
        # `torch.utils.swap_tensors` refuses a tensor that the graph of an earlier forward holds, and spoils that graph.
        torch._C._swap_tensor_impl(tensor, other)
    except RuntimeError:  # something holds a weak reference to the memory
        return other
    return tensor


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

"""The state of the whole model, wherever its parts are kept: brought together, or the part that a rank answers for."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from heterodyne.errors import CheckpointError
from heterodyne.plan.boxes import Box, inside
from heterodyne.plan.state_shards import Range
from heterodyne.runtime.comm.communicator import Communicator
from heterodyne.runtime.weights.boxed import boxed
from heterodyne.runtime.weights.materialise import stored_tensors
from heterodyne.runtime.weights.optimizer import initialise_state, state_by_name
from heterodyne.runtime.weights.ownership import Ownership
from heterodyne.runtime.weights.pieces import Pieces, part_of
from heterodyne.runtime.weights.wrapped_state import has_wrapped, unwrapped

__all__ = [
    "gathered_model",
    "gathered_optimizer",
    "gathered_tensors",
    "held_entries",
    "own_boxes",
    "put_own_part",
    "restored_model",
    "share_whole_state",
]


_NO_SHARDS: Mapping[str, Tensor] = {}


def held_entries(module: nn.Module) -> frozenset[str]:
    """The entries of the module's state dict that are on this rank."""
    kept = module.state_dict(keep_vars=True)
    return frozenset(name for name, entry in kept.items() if not (isinstance(entry, Tensor) and entry.is_meta))


def gathered_model(
    module: nn.Module,
    ownership: Ownership,
    communicator: Communicator,
    shards: Mapping[str, Tensor] = _NO_SHARDS,
    *,
    on: int | None = None,
) -> dict[str, Any]:
    """What ``module.state_dict()`` would be, with every value from its keeper; ``on`` one rank (nothing on the others), or on all.

    Collective. What this rank is the keeper of is not copied, unless it is cut. ``shards``: what is held of parameters that are sharded,
    row after row.
    """
    tensors = gathered_tensors(module, ownership, communicator, shards, on=on)
    if on is not None and on != communicator.rank:
        return {}
    values = {id(tensor): tensors[name] for name, tensor in stored_tensors(module)}
    kept = module.state_dict(keep_vars=True)
    return {name: values.get(id(entry), entry) for name, entry in kept.items()}


def gathered_tensors(
    module: nn.Module,
    ownership: Ownership,
    communicator: Communicator,
    shards: Mapping[str, Tensor] = _NO_SHARDS,
    *,
    on: int | None = None,
    names: Collection[str] | None = None,
) -> dict[str, Tensor]:
    """Return every parameter and buffer (or those ``names``), also those that a state dict leaves out, with every value from its keeper.

    See `gathered_model`.
    """
    values: dict[str, Tensor] = {}
    for name, tensor in stored_tensors(module):
        if names is not None and name not in names:
            continue
        # A holder that is not the keeper may have drifted from it in the last bits.
        whole = _brought_together(name, shards.get(name, tensor.detach()), ownership, communicator)
        if on is None or on == communicator.rank:
            values[name] = whole
    return values


def _apart(name: str, ownership: Ownership) -> bool:
    return ownership.apart and name in ownership.shards


def _brought_together(name: str, own: Tensor, ownership: Ownership, communicator: Communicator) -> Tensor:
    """A tensor, each part of it from the rank whose values count. ``own``: what is held of it here, or a stand-in. Collective."""
    if _apart(name, ownership):
        return _joined(own, ownership.shapes[name], own.dtype, ownership.shards[name], communicator)
    parts = ownership.parts(name)
    if len(parts) == 1:
        return _from_keeper(own, parts[0][1], communicator)
    device = "cpu" if own.is_meta else own.device
    whole = torch.empty(ownership.shapes[name], dtype=own.dtype, device=device)
    for box, rank in parts:
        of_whole = boxed(whole, box)
        part = torch.empty(of_whole.shape, dtype=own.dtype, device=device)
        if rank == communicator.rank:
            part.copy_(boxed(own, inside(ownership.box(rank, name), box)))
        communicator.control.broadcast(part, rank)
        of_whole.copy_(part)
    return whole


def _from_keeper(own: Tensor, keeper: int, communicator: Communicator) -> Tensor:
    """Return the keeper's tensor, on other ranks a copy: what they hold of it is trained on as it is. Collective."""
    if communicator.rank == keeper:
        communicator.control.broadcast(own.data, keeper)  # a broadcast counts as a write, also where it sends
        return own
    copy = torch.empty_like(own, device="cpu", requires_grad=False)
    communicator.control.broadcast(copy, keeper)
    return copy


def gathered_optimizer(
    own: Mapping[str, Mapping[str, Any]],
    ownership: Ownership,
    communicator: Communicator,
    names: Iterable[str],
) -> dict[str, dict[str, Any]]:
    """The optimizer's state of each parameter on every rank. Collective.

    ``own``: what is held here; ``names``: which parameters.
    """
    gathered: dict[str, dict[str, Any]] = {}
    for name in names:
        mine = own.get(name, {})
        shards = ownership.shards.get(name)
        teller, elements = ownership.parts(name)[0][1], -1
        if shards is not None:
            teller, (start, stop) = next(iter(next(iter(shards.values())).items()))
            elements = stop - start
        described = {k: (tuple(v.shape), v.dtype) if isinstance(v, Tensor) else None for k, v in sorted(mine.items())}
        wanted = communicator.broadcast_object(described, teller)
        values: dict[str, Any] = {}
        for key, shape in wanted.items():
            held = mine.get(key)
            as_parameter = shape is not None and len(shape[0]) == len(ownership.shapes[name])
            if shape is None:
                values[key] = communicator.broadcast_object(held, teller)
            elif shards is not None and as_parameter and prod(shape[0]) == elements:
                values[key] = _joined(held, ownership.shapes[name], shape[1], shards, communicator)
            elif name in ownership.boxes and as_parameter:
                # It lies as its parameter does: what has as many dims is cut alike.
                stand_in = torch.empty(ownership.shapes[name], dtype=shape[1], device="meta")
                values[key] = _brought_together(
                    name, held if isinstance(held, Tensor) else stand_in, ownership, communicator
                )
            else:
                stand_in = torch.empty(shape[0], dtype=shape[1], device="meta")
                values[key] = _from_keeper(held if isinstance(held, Tensor) else stand_in, teller, communicator)
        if values:
            gathered[name] = values
    return gathered


def _joined(
    held: Any,
    shape: Sequence[int],
    dtype: torch.dtype,
    shards: Mapping[Box, Mapping[int, Range]],
    communicator: Communicator,
) -> Tensor:
    """A tensor of that shape on the host, of the elements that each rank has; ``held``: those of this rank. Collective."""
    whole = torch.empty(tuple(shape), dtype=dtype)
    for box, ranges in shards.items():
        of_whole = boxed(whole, box)
        flat = torch.empty(of_whole.numel(), dtype=dtype)
        for rank, (start, stop) in ranges.items():
            if rank == communicator.rank:
                flat[start:stop].copy_(held.detach().reshape(-1))
            communicator.control.broadcast(flat[start:stop], rank)
        of_whole.copy_(flat.view(of_whole.shape))
    return whole


def restored_model(
    module: nn.Module,
    state: Mapping[str, Any],
    ownership: Ownership,
    rank: int,
    shards: Mapping[str, Tensor] = _NO_SHARDS,
) -> None:
    """Take what is held here from a whole state. Raises CheckpointError if something is missing. ``shards``: see `gathered_model`."""
    kept = module.state_dict(keep_vars=True)
    names = {id(tensor): name for name, tensor in stored_tensors(module)}
    for name, entry in kept.items():
        if not isinstance(entry, Tensor) or entry.is_meta:
            continue
        box = ownership.box(rank, names.get(id(entry), name))
        shape = tuple(ownership.shapes[names[id(entry)]]) if box else tuple(entry.shape)
        if name not in state or tuple(state[name].shape) != shape:
            raise CheckpointError(f"the checkpoint has no {name!r} of shape {shape}: it is of another model")
        put_own_part(names.get(id(entry), name), entry, state[name], ownership, rank, shards)


@torch.no_grad()
def put_own_part(
    name: str,
    tensor: Tensor,
    whole: Tensor | Pieces,
    ownership: Ownership,
    rank: int,
    shards: Mapping[str, Tensor] = _NO_SHARDS,
) -> None:
    """Set what this rank holds of a parameter or buffer to its part of a ``whole`` value. ``shards``: see `gathered_model`."""
    box, own = ownership.box(rank, name), shards.get(name)
    if own is None:
        tensor.copy_(part_of(whole, box))
    elif own.numel():
        own_range = ownership.updated(rank, name) or (0, own.numel())
        if isinstance(whole, Pieces):
            own.copy_(whole.within(box).part(own_range))
        else:
            own.copy_(boxed(whole, box).reshape(-1)[slice(*own_range)])


def own_boxes(state: Mapping[str, Mapping[str, Any]], ownership: Ownership, rank: int) -> dict[str, dict[str, Any]]:
    """Return what belongs to the boxes that a rank has, of the optimizer's state of whole parameters. Nothing is copied."""
    found: dict[str, dict[str, Any]] = {}
    for name, values in state.items():
        box, shape = ownership.box(rank, name), ownership.shapes.get(name)
        found[name] = {
            key: value
            if not box or not isinstance(value, Tensor | Pieces) or tuple(value.shape) != shape
            else value.within(box)
            if isinstance(value, Pieces)
            else boxed(value, box)
            for key, value in values.items()
        }
    return found


def share_whole_state(
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    parameters: Mapping[str, nn.Parameter],
    communicator: Communicator,
    *,
    leader: int,
    followers: Collection[int],
    masters: Mapping[str, nn.Parameter],
) -> None:
    """Where each rank holds the whole model: give ranks that do not train it the leader's weights, buffers, master weights and
    optimizer state, in place.

    Collective.
    """
    control, follows = communicator.control, communicator.rank in followers

    def share(tensor: Tensor) -> None:
        keeps = follows or communicator.rank == leader
        control.broadcast(tensor if keeps else torch.empty_like(tensor, device="cpu", requires_grad=False), leader)

    for _, tensor in stored_tensors(module):
        share(tensor.data)
    for _, master in sorted(masters.items()):
        share(master.data)
    own = {name: _layout(values) for name, values in state_by_name(optimizer, parameters).items()}
    layout = communicator.broadcast_object(own, leader)
    if follows and own != layout:
        _lay_out(optimizer, parameters, layout)
    for name, values in layout.items():
        state = optimizer.state[parameters[name]]
        there = unwrapped(state)
        for key, value in values.items():
            if isinstance(value, _Shape):
                share(there[key])
            elif follows:
                state[key] = value


@dataclass(frozen=True)
class _Shape:
    """Of a tensor of the optimizer's state. ``device``: its type."""

    sizes: tuple[int, ...]
    dtype: torch.dtype
    device: str


def _layout(values: Mapping[str, Any]) -> dict[str, Any]:
    """The state of a parameter, with shapes in the place of tensors."""
    return {
        key: _Shape(tuple(value.shape), value.dtype, value.device.type) if isinstance(value, Tensor) else value
        for key, value in sorted(values.items())
    }


def _lay_out(
    optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter], layout: Mapping[str, Mapping[str, Any]]
) -> None:
    """Give an optimizer state of that layout. It is stepped for that only where tensors wrap others, since it may count its steps."""
    if any(map(has_wrapped, layout.values())):
        initialise_state(optimizer)
    for name, parameter in parameters.items():
        if name not in layout:
            optimizer.state.pop(parameter, None)
        elif not has_wrapped(layout[name]):
            home = parameter.device
            optimizer.state[parameter] = {
                key: torch.empty(value.sizes, dtype=value.dtype, device=home if value.device == home.type else "cpu")
                if isinstance(value, _Shape)
                else value
                for key, value in layout[name].items()
            }

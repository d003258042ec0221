"""The state of the whole model, wherever its parts are kept: brought together, or the part that a rank answers for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from heterodyne.errors import CheckpointError
from heterodyne.runtime.meeting.communicator import Communicator
from heterodyne.runtime.weights.materialise import stored_tensors
from heterodyne.runtime.weights.optimizer import initialise_state, state_by_name
from heterodyne.runtime.weights.ownership import Ownership

__all__ = ["gathered_model", "gathered_optimizer", "held_entries", "kept_model", "restored_model", "share_whole_state"]


def held_entries(module: nn.Module) -> frozenset[str]:
    """The entries of the module's state dict that are on this rank."""
    kept = module.state_dict(keep_vars=True)
    return frozenset(name for name, entry in kept.items() if not (isinstance(entry, Tensor) and entry.is_meta))


def kept_model(module: nn.Module, ownership: Ownership, rank: int) -> dict[str, Any]:
    """The entries of ``module.state_dict()`` that a rank answers for, not copied: each is one rank's."""
    keeper = {id(tensor): ownership.keeper(name) for name, tensor in stored_tensors(module)}
    kept = module.state_dict(keep_vars=True)
    return {
        name: entry.detach() if isinstance(entry, Tensor) else entry
        for name, entry in kept.items()
        if keeper.get(id(entry), ownership.active[0]) == rank
    }


def gathered_model(
    module: nn.Module, ownership: Ownership, communicator: Communicator, *, on: int | None = None
) -> dict[str, Any]:
    """What ``module.state_dict()`` would be, with every value from its keeper; ``on`` one rank (nothing on the others), or on all.

    Collective. What is held here is not copied.
    """
    values: dict[int, Tensor] = {}
    for name, tensor in stored_tensors(module):
        keeper = ownership.keeper(name)
        mine = tensor.detach() if not tensor.is_meta else torch.empty_like(tensor, device="cpu", requires_grad=False)
        # A holder that is not the keeper may have drifted from it in the last bits.
        communicator.control.broadcast(mine, keeper)
        if on is None or on == communicator.rank:
            values[id(tensor)] = mine
    if on is not None and on != communicator.rank:
        return {}
    kept = module.state_dict(keep_vars=True)
    return {name: values.get(id(entry), entry) for name, entry in kept.items()}


def gathered_optimizer(
    own: Mapping[str, Mapping[str, Any]], ownership: Ownership, communicator: Communicator, names: list[str]
) -> dict[str, dict[str, Any]]:
    """The optimizer's state of each parameter, from its keeper. Collective. ``own``: what is held here; ``names``: all that are trained."""
    gathered: dict[str, dict[str, Any]] = {}
    for name in names:
        keeper = ownership.keeper(name)
        mine = own.get(name, {})
        described = {k: (tuple(v.shape), v.dtype) if isinstance(v, Tensor) else None for k, v in sorted(mine.items())}
        wanted = communicator.broadcast_object(described, keeper)
        values: dict[str, Any] = {}
        for key, shape in wanted.items():
            if shape is None:
                values[key] = communicator.broadcast_object(mine.get(key), keeper)
                continue
            held = mine.get(key)
            values[key] = held if isinstance(held, Tensor) else torch.empty(shape[0], dtype=shape[1])
            communicator.control.broadcast(values[key], keeper)
        if values:
            gathered[name] = values
    return gathered


def restored_model(module: nn.Module, state: Mapping[str, Any]) -> None:
    """Take what is held here from a whole state. Raises CheckpointError if something is missing."""
    kept = module.state_dict(keep_vars=True)
    for name, entry in kept.items():
        if not isinstance(entry, Tensor) or entry.is_meta:
            continue
        if name not in state or state[name].shape != entry.shape:
            raise CheckpointError(
                f"the checkpoint has no {name!r} of shape {tuple(entry.shape)}: it is of another model"
            )
        with torch.no_grad():
            entry.copy_(state[name])


def share_whole_state(
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    parameters: Mapping[str, nn.Parameter],
    communicator: Communicator,
    *,
    leader: int,
) -> None:
    """Where each rank holds the whole model: give it the leader's weights, buffers and optimizer state, in place. Collective."""
    control = communicator.control
    for _, tensor in stored_tensors(module):
        control.broadcast(tensor.data, leader)
    own = state_by_name(optimizer, parameters)
    names = communicator.broadcast_object(sorted(own), leader)
    if sorted(own) != names:
        initialise_state(optimizer)
    for name, parameter in parameters.items():
        if name not in names:
            optimizer.state.pop(parameter, None)
            continue
        for key, value in sorted(optimizer.state[parameter].items()):
            if isinstance(value, Tensor):
                control.broadcast(value, leader)
            else:
                optimizer.state[parameter][key] = communicator.broadcast_object(value, leader)

"""The state of the whole model on every rank, wherever its parts are kept."""

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

__all__ = ["gathered_model", "gathered_optimizer", "restored_model", "share_whole_state"]


def gathered_model(module: nn.Module, ownership: Ownership, communicator: Communicator) -> dict[str, Any]:
    """What ``module.state_dict()`` would be, with every value from its keeper. Collective. What is held here is not copied."""
    values: dict[int, Tensor] = {}
    for name, tensor in stored_tensors(module):
        keeper = ownership.keeper(name)
        mine = tensor.detach() if not tensor.is_meta else torch.empty_like(tensor, device="cpu", requires_grad=False)
        # A holder that is not the keeper may have drifted from it in the last bits.
        communicator.control.broadcast(mine, keeper)
        values[id(tensor)] = mine
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

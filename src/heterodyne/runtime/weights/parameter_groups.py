"""The groups of an optimizer: which parameters are in which, and with what options."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from heterodyne.errors import CheckpointError

__all__ = ["grouped_as", "load_options", "options_by_name", "options_of", "set_rate"]

_MEMBERS = ("params", "param_names")
_PLAIN = (bool, int, float, str, type(None))


def set_rate(group: dict[str, Any], rate: float) -> None:
    """Give a parameter group a learning rate. One that is a tensor stays that tensor, which compiled steps ask for."""
    if isinstance(group["lr"], Tensor):
        group["lr"].fill_(rate)
    else:
        group["lr"] = rate


def options_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """All of a parameter group but its parameters and their names."""
    return {key: value for key, value in group.items() if key not in _MEMBERS}


def grouped_as(
    made: torch.optim.Optimizer,
    reference: torch.optim.Optimizer,
    updated: Mapping[str, nn.Parameter],
    originals: Mapping[str, nn.Parameter],
) -> None:
    """Give an optimizer of what is ``updated`` (shards, copies on the host) the groups of one that was made of the ``originals``.

    A function that makes groups may look at sizes or at which objects parameters are, and shards are other objects of other sizes.
    """
    names = {id(parameter): name for name, parameter in originals.items()}
    groups = []
    for group in reference.param_groups:
        held = [names[id(p)] for p in group["params"] if names.get(id(p)) in updated]
        own = {key: value for key, value in group.items() if key not in _MEMBERS}
        own["params"] = [updated[name] for name in held]
        if "param_names" in group:
            given = dict(zip(map(id, group["params"]), group["param_names"], strict=True))
            own["param_names"] = [given[id(originals[name])] for name in held]
        groups.append(own)
    made.param_groups[:] = groups


def options_by_name(
    optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter]
) -> dict[str, dict[str, Any]]:
    """The options of the group of each parameter, as far as JSON can say them; a rate that is a tensor is a number."""
    names = {id(parameter): name for name, parameter in parameters.items()}
    found: dict[str, dict[str, Any]] = {}
    for group in optimizer.param_groups:
        options = {key: _plain(value) for key, value in options_of(group).items() if _is_plain(value)}
        found |= {names[id(p)]: options for p in group["params"] if id(p) in names}
    return found


def load_options(
    optimizer: torch.optim.Optimizer,
    parameters: Mapping[str, nn.Parameter],
    options: Mapping[str, Mapping[str, Any]],
) -> None:
    """Give each group the options that its parameters had, as PyTorch's own ``load_state_dict`` does; a group without any keeps its own.

    Raises CheckpointError where parameters of one group had different ones.
    """
    names = {id(parameter): name for name, parameter in parameters.items()}
    for group in optimizer.param_groups:
        there = [names[id(p)] for p in group["params"] if names.get(id(p)) in options]
        for name in there[1:]:
            if options[name] != options[there[0]]:
                raise CheckpointError(
                    f"{there[0]} and {name} are in one group of the optimizer now, and were in groups with different options when the "
                    "checkpoint was written: make the same groups as then"
                )
        for key, value in options[there[0]].items() if there else ():
            _set(group, key, value)


def _set(group: dict[str, Any], key: str, value: Any) -> None:
    if isinstance(group.get(key), Tensor):
        group[key].fill_(value)
    else:
        group[key] = tuple(value) if isinstance(group.get(key), tuple) else value


def _is_plain(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.dim() == 0
    return isinstance(value, _PLAIN) or (isinstance(value, (list, tuple)) and all(map(_is_plain, value)))


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.item()
    return [_plain(item) for item in value] if isinstance(value, (list, tuple)) else value

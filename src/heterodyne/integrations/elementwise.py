"""An optimizer that a script has made of the whole model, as one of what a rank holds."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import nn
from torch.optim import Optimizer

from heterodyne.errors import HeterodyneError

__all__ = ["by_name", "by_number", "follow", "remade"]

# They update each element by itself, so that a rank may update the part that it holds.
_KINDS = (torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD, torch.optim.RMSprop, torch.optim.Adagrad)


def remade(optimizer: Optimizer, model: nn.Module) -> Callable[..., Optimizer]:
    """Makes the same optimizer, with the same groups, of the parameters that a rank holds.

    Raises HeterodyneError for one that cannot be made of a part of the parameters.
    """
    kind: Any = type(optimizer)
    if kind not in _KINDS or optimizer.state:
        names = ", ".join(one.__name__ for one in _KINDS)
        raise HeterodyneError(
            f"{kind.__name__} is none of {names}, freshly made: take one, or hd.distribute(optimizer=...)"
        )
    of = {parameter: name for name, parameter in model.named_parameters()}
    known = set(inspect.signature(kind).parameters)
    groups = [
        ({of[p] for p in group["params"]}, {name: value for name, value in group.items() if name in known - {"params"}})
        for group in optimizer.param_groups
    ]

    def factory(named_parameters: Iterable[tuple[str, nn.Parameter]]) -> Optimizer:
        held = list(named_parameters)
        made = [{"params": [p for name, p in held if name in names], **options} for names, options in groups]
        return cast(Optimizer, kind(made))

    return factory


def follow(real: Optimizer, script: Optimizer) -> None:
    """Give the optimizer of the rank the rates and options that the script's own has now, as its schedulers set them."""
    for group, chosen in zip(real.param_groups, script.param_groups, strict=True):
        group.update({name: value for name, value in chosen.items() if name not in ("params", "param_names")})


def by_number(state: Mapping[str, Any], groups: Sequence[Sequence[str]], optimizer: Optimizer) -> dict[str, Any]:
    """State by name as an optimizer of torch writes it: parameters by number, in the order of their groups."""
    number = itertools.count()
    made: dict[str, Any] = {"state": {}, "param_groups": []}
    for names, group in zip(groups, optimizer.param_groups, strict=True):
        numbers = {name: next(number) for name in names}
        made["state"] |= {numbers[name]: state[name] for name in names if name in state}
        options = {name: value for name, value in group.items() if name != "params"}
        made["param_groups"].append({**options, "params": list(numbers.values())})
    return made


def by_name(state: Mapping[int, Any], groups: Sequence[Sequence[str]]) -> dict[str, Any]:
    """The inverse of `by_number`."""
    names = dict(enumerate(itertools.chain.from_iterable(groups)))
    return {names[number]: values for number, values in state.items()}

"""An optimizer that a script has made of the whole model, as one of what a rank holds."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, cast

from torch import nn
from torch.optim import Optimizer

from heterodyne.errors import HeterodyneError
from heterodyne.runtime.weights.parameter_groups import options_of

__all__ = ["by_name", "by_number", "follow", "remade", "take_over"]

_REST = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def remade(optimizer: Optimizer, model: nn.Module) -> Callable[..., Optimizer]:
    """Return a function that makes the same optimizer, with the same groups, of the parameters that a rank holds.

    Its class is called with what its groups say, so each argument of the class must be an option of a group, as in torch.optim.
    Raises HeterodyneError for another class, and for an optimizer that has made a step.
    """
    kind: Any = type(optimizer)
    if optimizer.state:
        raise HeterodyneError(
            f"{kind.__name__} has made steps before, or has loaded state, which would be lost: pass one that is freshly made, and load its "
            "state afterwards (trainer.load_checkpoint() or trainer.load_state_dict(state))"
        )
    options = [name for name, one in inspect.signature(kind).parameters.items() if one.kind not in _REST][1:]
    if missing := [name for name in options if any(name not in group for group in optimizer.param_groups)]:
        raise HeterodyneError(
            f"{kind.__name__} cannot be made again of the weights that a rank holds, since it does not keep its {', '.join(missing)} in "
            "its groups: pass a function that makes it, hd.distribute(optimizer=lambda parameters: ...)"
        )
    of = {parameter: name for name, parameter in model.named_parameters()}
    if foreign := sum(p not in of for group in optimizer.param_groups for p in group["params"]):
        raise HeterodyneError(
            f"{kind.__name__} has {foreign} parameter(s) that neither the model nor its loss has: make it of those of the model that is "
            "distributed, as it is then"
        )
    groups = [
        ({of[p] for p in group["params"]}, {name: value for name, value in group.items() if name in options})
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
        group.update(options_of(chosen))


def take_over(script: Optimizer, real: Optimizer) -> None:
    """Make the script's optimizer that of the rank: they share groups, state and hooks from now on, so schedulers, ``state_dict()`` and
    ``zero_grad()`` of the script's are those of the rank's.
    """
    follow(real, script)
    for name, value in vars(script).items():
        if name.endswith("_hooks"):
            vars(real)[name].update(value)
        elif name not in ("param_groups", "state"):  # defaults; and what schedulers and hooks have set
            vars(real)[name] = value
    script.__dict__ = vars(real)


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
